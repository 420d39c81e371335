"""Random changes of training images, inside the compiled step.

References: Jeong and Hwang, Factorized-FL (2022), names the four: a resized crop, a flip, colour
jitter, gray. How strong they are is not published; the values are SimCLR's (Chen et al., 2020), but
for the smallest crop, a fifth of the image, of which 32 pixels leave something to see.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

_AREA, _RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
_JITTER, _HUE = 0.4, 0.1  # brightness, contrast and saturation by up to 40 %; hue by a tenth turn
_P_JITTER, _P_GRAY = 0.8, 0.2
_LUMA = (0.299, 0.587, 0.114)
# Luma and two axes of colour, in which a turn is a change of hue.
_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def augment(x: jax.Array, key: jax.Array) -> jax.Array:
    """Images [B, H, W, C] with values in [0, 1], each changed in its own way.

    Colour is left alone where C is not 3, but for brightness and contrast.
    """
    return jax.vmap(_one)(x, jax.random.split(key, len(x)))


def _one(image: jax.Array, key: jax.Array) -> jax.Array:
    crop_key, flip_key, colour_key = jax.random.split(key, 3)
    image = _crop(image, crop_key)
    image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
    return _colour(image, colour_key)


def _crop(image: jax.Array, key: jax.Array) -> jax.Array:
    """A part of random size, shape and place, stretched to the whole."""
    area_key, ratio_key, y_key, x_key = jax.random.split(key, 4)
    h, w, c = image.shape
    area = jax.random.uniform(area_key, (), minval=_AREA[0], maxval=_AREA[1])
    ratio = jnp.exp(
        jax.random.uniform(ratio_key, (), minval=math.log(_RATIO[0]), maxval=math.log(_RATIO[1]))
    )
    share = jnp.minimum(jnp.sqrt(area * jnp.stack([1 / ratio, ratio])), 1.0)
    place = jnp.stack([jax.random.uniform(y_key), jax.random.uniform(x_key)])
    start = (1 - share) * jnp.array([h, w], jnp.float32) * place
    scale = 1 / share
    return jax.image.scale_and_translate(
        image, (h, w, c), (0, 1), scale, -start * scale, method="linear", antialias=False
    )


def _colour(image: jax.Array, key: jax.Array) -> jax.Array:
    keys = jax.random.split(key, 6)

    def factor(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (), minval=1 - _JITTER, maxval=1 + _JITTER)

    coloured = image.shape[-1] == 3
    gray = image @ jnp.array(_LUMA) if coloured else image.mean(-1)
    changed = image * factor(keys[0])
    mean = gray.mean() * factor(keys[0])
    changed = mean + (changed - mean) * factor(keys[1])
    if coloured:
        luma = (changed @ jnp.array(_LUMA))[..., None]
        changed = luma + (changed - luma) * factor(keys[2])
        changed = _turn(changed, jax.random.uniform(keys[3], (), minval=-_HUE, maxval=_HUE))
    image = jnp.where(jax.random.bernoulli(keys[4], _P_JITTER), jnp.clip(changed, 0, 1), image)
    if not coloured:
        return image
    flat = jnp.broadcast_to((image @ jnp.array(_LUMA))[..., None], image.shape)
    return jnp.where(jax.random.bernoulli(keys[5], _P_GRAY), flat, image)


def _turn(image: jax.Array, turns: jax.Array) -> jax.Array:
    """Hue, by so many turns."""
    forth = jnp.array(_YIQ)
    cos, sin = jnp.cos(2 * math.pi * turns), jnp.sin(2 * math.pi * turns)
    one, zero = jnp.ones(()), jnp.zeros(())
    turn = jnp.stack(
        [jnp.stack(row) for row in ((one, zero, zero), (zero, cos, -sin), (zero, sin, cos))]
    )
    return image @ (jnp.linalg.inv(forth) @ turn @ forth).T


def on_normalised(scale: Any, shift: Any) -> Any:
    """`augment` for images that were stored as 0 to 255 and have become x * scale + shift."""

    def changed(x: jax.Array, key: jax.Array) -> jax.Array:
        raw = (x - shift) / (255 * scale)
        return augment(raw, key) * (255 * scale) + shift

    return changed
