"""Tests of image augmentation: invariants and frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data import augment as module
from fedjax_pfl.data.augment import _colour, _crop, _rotate_hue, augment, on_normalised
from fedjax_pfl.runs import build, runner
from tests.commands import message

KEYS = jax.random.split(jax.random.key(0), 400)


def test_crop_scales_the_slopes_of_a_ramp():
    """Slopes shrink by the cropped fraction of each side, between √(0.2·¾) and 1."""
    y, x = jnp.meshgrid(jnp.arange(16.0), jnp.arange(16.0), indexing="ij")
    ramp = jnp.stack([y, x], -1)
    augmented = np.asarray(jax.jit(jax.vmap(lambda key: _crop(ramp, key)))(KEYS))
    inner = augmented[:, 4:12, 4:12]  # border pixels cannot be interpolated
    down, across = np.diff(inner[..., 0], axis=1), np.diff(inner[..., 1], axis=2)
    assert down.std((1, 2)).max() < 1e-3
    shares = np.stack([down.mean((1, 2)), across.mean((1, 2))])
    assert np.sqrt(0.2 * 0.75) - 1e-3 <= shares.min() < 0.5
    assert 0.9 < shares.max() <= 1 + 1e-3
    area = shares.prod(0)
    assert abs(area.mean() - 0.57) < 0.05  # U(0.2, 1), slightly less because sides are at most 1
    assert (shares[0] / shares[1]).max() <= 4 / 3 + 1e-2
    # Values stay within the range of the image.
    assert augmented.min() >= -1e-3
    assert augmented.max() <= 15 + 1e-3


def test_half_of_the_images_are_flipped(monkeypatch):
    monkeypatch.setattr(module, "_crop", lambda image, key: image)
    monkeypatch.setattr(module, "_colour", lambda image, key: image)
    image = jnp.arange(4.0).reshape(1, 4, 1) / 4
    augmented = np.asarray(jax.vmap(lambda key: module._augment_image(image, key))(KEYS))
    augmented = augmented[:, 0, :, 0]
    flipped = augmented[:, 0] > augmented[:, 3]
    np.testing.assert_allclose(flipped.mean(), 0.5, atol=0.08)
    np.testing.assert_allclose(np.sort(augmented), np.tile(np.arange(4) / 4, (400, 1)))


def test_frequency_of_colour_changes():
    image = jnp.array([[[0.6, 0.3, 0.5], [0.5, 0.5, 0.4]]])
    augmented = np.asarray(jax.jit(jax.vmap(lambda key: _colour(image, key)))(KEYS))
    flat = np.ptp(augmented, axis=-1).max((1, 2)) < 1e-6
    np.testing.assert_allclose(flat.mean(), 0.2, atol=0.06)
    unchanged = np.abs(augmented - np.asarray(image)).max((1, 2, 3)) < 1e-6
    np.testing.assert_allclose(unchanged.mean(), 0.2 * 0.8, atol=0.06)
    assert augmented.min() >= 0
    assert augmented.max() <= 1
    gray_image = _colour(image[..., :1], KEYS[0])
    assert gray_image.shape == (1, 2, 1)


def test_contrast_does_not_change_a_uniform_image():
    """Brightness multiplies it by 0.6 to 1.4; contrast is relative to the resulting mean."""
    image = jnp.full((2, 2, 1), 0.5)
    augmented = np.asarray(jax.jit(jax.vmap(lambda key: _colour(image, key)))(KEYS))
    assert 0.3 - 1e-6 <= augmented.min() < 0.32
    assert 0.68 < augmented.max() <= 0.7 + 1e-6


def test_hue_rotation_keeps_luma_and_a_full_turn_is_the_identity():
    image = jax.random.uniform(KEYS[0], (5, 5, 3))
    np.testing.assert_allclose(_rotate_hue(image, jnp.float32(1.0)), image, atol=1e-5)
    quarter = _rotate_hue(image, jnp.float32(0.25))
    luma = jnp.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(quarter @ luma, image @ luma, atol=1e-5)
    assert np.abs(np.asarray(quarter - image)).max() > 0.1
    rotated = image
    for _ in range(4):
        rotated = _rotate_hue(rotated, jnp.float32(0.25))
    np.testing.assert_allclose(rotated, image, atol=1e-4)


def test_images_are_augmented_independently_and_reproducibly():
    x = jnp.broadcast_to(jax.random.uniform(KEYS[0], (8, 8, 3)), (6, 8, 8, 3))
    augmented = jax.jit(augment)(x, KEYS[1])
    np.testing.assert_array_equal(augmented, jax.jit(augment)(x, KEYS[1]))
    assert len(np.unique(np.asarray(augmented).reshape(6, -1), axis=0)) == 6


def test_normalised_images_are_augmented_as_pixels(monkeypatch):
    inputs = []
    monkeypatch.setattr(module, "augment", lambda x, key: inputs.append(x) or 1 - x)
    scale, shift = jnp.array([[0.01, 0.02]]), jnp.array([[-1.0, 0.5]])
    raw = jnp.array([[0.0, 255.0], [51.0, 102.0]])
    augmented = on_normalised(scale, shift)(raw * scale + shift, KEYS[0])
    np.testing.assert_allclose(inputs[0], raw / 255, atol=1e-6)
    np.testing.assert_allclose(augmented, (255 - raw) * scale + shift, atol=1e-5)


@pytest.mark.slow("two runs")
def test_augment_changes_training_and_needs_images():
    settings = {"rounds": 1, "eval_every": 1, "clients": 2, "evaluate_after": False}
    losses = [
        runner.run({**settings, "augment": on}).metrics[-1]["train_loss"] for on in (False, True)
    ]
    assert losses[0] != losses[1]
    features = {**settings, "augment": True, "dataset": "synthetic", "model": "mlp"}
    assert "leave it off" in message(build.build, runner.configuration.complete(features))
