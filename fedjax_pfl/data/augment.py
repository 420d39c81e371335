"""Random augmentation of training images, inside the compiled step.

References: Jeong and Hwang, Factorized-FL (2022), names the four changes: a resized crop, a flip,
colour jitter, gray. Their strengths are not published; we use those of SimCLR (Chen et al., 2020),
except for the smallest crop. A fifth of the image keeps images of 32 pixels recognisable.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

_AREA, _RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
_JITTER, _HUE = 0.4, 0.1  # brightness, contrast, saturation: 40 %; hue: a tenth turn
_P_JITTER, _P_GRAY = 0.8, 0.2
_LUMA = (0.299, 0.587, 0.114)
# Luma and two colour axes; a rotation of the latter changes hue.
_YIQ = (_LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def augment(x: jax.Array, key: jax.Array) -> jax.Array:
    """Crops, flips and recolours images at random, each independently.

    Takes and returns images [B, H, W, C] with values in [0, 1].
    Saturation, hue and gray need C = 3; other images only change in brightness and contrast.
    """
    return jax.vmap(_augment_image)(x, jax.random.split(key, len(x)))


def _augment_image(image: jax.Array, key: jax.Array) -> jax.Array:
    """Crops, flips and recolours one image [H, W, C] at random; its shape stays."""
    crop_key, flip_key, colour_key = jax.random.split(key, 3)
    image = _crop(image, crop_key)
    image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
    return _colour(image, colour_key)


def _crop(image: jax.Array, key: jax.Array) -> jax.Array:
    """Crops a random rectangle of an image [H, W, C] and resizes it to [H, W, C]."""
    area_key, ratio_key, y_key, x_key = jax.random.split(key, 4)
    h, w, c = image.shape
    area = jax.random.uniform(area_key, (), minval=_AREA[0], maxval=_AREA[1])
    ratio = jnp.exp(
        jax.random.uniform(ratio_key, (), minval=math.log(_RATIO[0]), maxval=math.log(_RATIO[1]))
    )
    sides = jnp.minimum(jnp.sqrt(area * jnp.stack([1 / ratio, ratio])), 1.0)
    offset = jnp.stack([jax.random.uniform(y_key), jax.random.uniform(x_key)])
    start = (1 - sides) * jnp.array([h, w], jnp.float32) * offset
    scale = 1 / sides
    return jax.image.scale_and_translate(
        image, (h, w, c), (0, 1), scale, -start * scale, method="linear", antialias=False
    )


def _colour(image: jax.Array, key: jax.Array) -> jax.Array:
    """Changes brightness, contrast, saturation and hue at random; makes some images gray.

    The image is [H, W, C] with values in [0, 1]. Unless C is 3, only brightness and contrast
    change.
    """
    keys = jax.random.split(key, 6)

    def factor(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (), minval=1 - _JITTER, maxval=1 + _JITTER)

    has_colour = image.shape[-1] == 3
    gray = image @ jnp.array(_LUMA) if has_colour else image.mean(-1)
    jittered = image * factor(keys[0])
    mean = gray.mean() * factor(keys[0])
    jittered = mean + (jittered - mean) * factor(keys[1])
    if has_colour:
        luma = (jittered @ jnp.array(_LUMA))[..., None]
        jittered = luma + (jittered - luma) * factor(keys[2])
        angle = jax.random.uniform(keys[3], (), minval=-_HUE, maxval=_HUE)
        jittered = _rotate_hue(jittered, angle)
    image = jnp.where(jax.random.bernoulli(keys[4], _P_JITTER), jnp.clip(jittered, 0, 1), image)
    if not has_colour:
        return image
    gray_image = jnp.broadcast_to((image @ jnp.array(_LUMA))[..., None], image.shape)
    return jnp.where(jax.random.bernoulli(keys[5], _P_GRAY), gray_image, image)


def _rotate_hue(image: jax.Array, turns: jax.Array) -> jax.Array:
    """Rotates the hue of an image [H, W, 3]; `turns`, a scalar, is 1 for the full circle."""
    to_yiq = jnp.array(_YIQ)
    cos, sin = jnp.cos(2 * math.pi * turns), jnp.sin(2 * math.pi * turns)
    rotation = jnp.array([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])
    return image @ (jnp.linalg.inv(to_yiq) @ rotation @ to_yiq).T


def on_normalised(scale: Any, shift: Any) -> Any:
    """Returns `augment` for normalised images: a function (x, key) -> x.

    It takes and returns images that were uint8 and became x * scale + shift. `scale` and `shift`
    are arrays that broadcast to [B, H, W, C].
    """

    def augment_normalised(x: jax.Array, key: jax.Array) -> jax.Array:
        raw = (x - shift) / (255 * scale)
        return augment(raw, key) * (255 * scale) + shift

    return augment_normalised
