"""Random changes of images: what they keep, and how often they happen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import augment as module
from fedjax_pfl.data.augment import _colour, _crop, _rotate_hue, augment, on_normalised
from fedjax_pfl.runs import build, runner

KEYS = jax.random.split(jax.random.key(0), 400)


def test_a_crop_of_a_ramp_is_a_ramp_of_the_part():
    """Slopes shrink by the part's share of each side, between √(.2·¾) and 1."""
    y, x = jnp.meshgrid(jnp.arange(16.0), jnp.arange(16.0), indexing="ij")
    ramp = jnp.stack([y, x], -1)
    got = np.asarray(jax.jit(jax.vmap(lambda key: _crop(ramp, key)))(KEYS))
    inside = got[:, 4:12, 4:12]  # at the border there is no pixel beyond to interpolate with
    down, across = np.diff(inside[..., 0], axis=1), np.diff(inside[..., 1], axis=2)
    assert down.std((1, 2)).max() < 1e-3
    shares = np.stack([down.mean((1, 2)), across.mean((1, 2))])
    assert np.sqrt(0.2 * 0.75) - 1e-3 <= shares.min() < 0.5
    assert 0.9 < shares.max() <= 1 + 1e-3
    area = shares.prod(0)
    assert abs(area.mean() - 0.57) < 0.05  # U(.2, 1), a little less where a side is cut to 1
    assert (shares[0] / shares[1]).max() <= 4 / 3 + 1e-2
    # It lies within the image.
    assert got.min() >= -1e-3
    assert got.max() <= 15 + 1e-3


def test_half_are_flipped(monkeypatch):
    monkeypatch.setattr(module, "_crop", lambda image, key: image)
    monkeypatch.setattr(module, "_colour", lambda image, key: image)
    image = jnp.arange(4.0).reshape(1, 4, 1) / 4
    got = np.asarray(jax.vmap(lambda key: module._augment_image(image, key))(KEYS))[:, 0, :, 0]
    flipped = got[:, 0] > got[:, 3]
    np.testing.assert_allclose(flipped.mean(), 0.5, atol=0.08)
    np.testing.assert_allclose(np.sort(got), np.tile(np.arange(4) / 4, (400, 1)))


def test_colours():
    image = jnp.array([[[0.6, 0.3, 0.5], [0.5, 0.5, 0.4]]])
    got = np.asarray(jax.jit(jax.vmap(lambda key: _colour(image, key)))(KEYS))
    flat = np.ptp(got, axis=-1).max((1, 2)) < 1e-6
    np.testing.assert_allclose(flat.mean(), 0.2, atol=0.06)
    same = np.abs(got - np.asarray(image)).max((1, 2, 3)) < 1e-6
    np.testing.assert_allclose(same.mean(), 0.2 * 0.8, atol=0.06)
    assert got.min() >= 0
    assert got.max() <= 1
    one = _colour(image[..., :1], KEYS[0])
    assert one.shape == (1, 2, 1)


def test_a_turn_of_hue_keeps_luma_and_a_whole_turn_everything():
    image = jax.random.uniform(KEYS[0], (5, 5, 3))
    np.testing.assert_allclose(_rotate_hue(image, jnp.float32(1.0)), image, atol=1e-5)
    quarter = _rotate_hue(image, jnp.float32(0.25))
    luma = jnp.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(quarter @ luma, image @ luma, atol=1e-5)
    assert np.abs(np.asarray(quarter - image)).max() > 0.1
    four = image
    for _ in range(4):
        four = _rotate_hue(four, jnp.float32(0.25))
    np.testing.assert_allclose(four, image, atol=1e-4)


def test_every_image_has_its_own_and_a_key_repeats():
    x = jnp.broadcast_to(jax.random.uniform(KEYS[0], (8, 8, 3)), (6, 8, 8, 3))
    got = jax.jit(augment)(x, KEYS[1])
    np.testing.assert_array_equal(got, jax.jit(augment)(x, KEYS[1]))
    assert len(np.unique(np.asarray(got).reshape(6, -1), axis=0)) == 6


def test_normalised_images_are_changed_as_they_were(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "augment", lambda x, key: seen.append(x) or 1 - x)
    scale, shift = jnp.array([[0.01, 0.02]]), jnp.array([[-1.0, 0.5]])
    raw = jnp.array([[0.0, 255.0], [51.0, 102.0]])
    got = on_normalised(scale, shift)(raw * scale + shift, KEYS[0])
    np.testing.assert_allclose(seen[0], raw / 255, atol=1e-6)
    np.testing.assert_allclose(got, (255 - raw) * scale + shift, atol=1e-5)


@pytest.mark.slow("two runs")
def test_training_changes_with_it_and_only_images_can():
    base = {"rounds": 1, "eval_every": 1, "clients": 2, "evaluate_after": False}
    losses = [runner.run({**base, "augment": on}).metrics[-1]["train_loss"] for on in (False, True)]
    assert losses[0] != losses[1]
    with pytest.raises(UsageError, match="leave it off"):
        build.build(
            runner.configuration.complete(
                {**base, "augment": True, "dataset": "synthetic", "model": "mlp"}
            )
        )
