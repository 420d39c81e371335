"""Tests of clipped and noised uploads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.transforms.upload_noise import NOISE, upload_noise

DOWN = {"params": {"a": jnp.float32([1.0, 1.0]), "b": jnp.float32([2.0])}}
# The change is (3, 0) and −4, with norm 5.
UP = {"params": {"a": jnp.float32([4.0, 1.0]), "b": jnp.float32([-2.0])}}
KEY = jax.random.key(2)


def scripted(upload: Any) -> Algorithm:
    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        return ClientResult(upload, upload, client, {"loss": jnp.zeros(())})

    return Algorithm(
        init=lambda key, start=None: State((), (), ()),
        send=lambda state, ctx: DOWN,
        train=train,
        receive=lambda state, cohort: (state.server, state.rows),
        personalize=lambda state, client, ctx: (),
        predict=lambda variables, x: x,
    )


def noised(clip_norm: float, multiplier: float, upload: Any = UP, key: jax.Array = KEY) -> Any:
    algorithm = upload_noise(clip_norm, multiplier)(scripted(upload))
    result = algorithm.train(DOWN, (), ClientContext(0, (), 0, key))
    assert result.variables is upload  # the trained model has no noise
    return result.upload


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("clip_norm", "expected"), [(2.5, [2.5, 1.0, 0.0]), (5.0, [4, 1, -2]), (99.0, [4, 1, -2])]
)
def test_larger_changes_are_scaled_down(clip_norm: float, expected: list[float]):
    np.testing.assert_allclose(flat(noised(clip_norm, 0.0)), expected, rtol=1e-6)
    np.testing.assert_array_equal(flat(noised(clip_norm, 0.0, DOWN)), flat(DOWN))  # no change


def test_noise_has_the_deviation_and_follows_the_key():
    down = {"w": jnp.zeros(20_000)}
    algorithm = upload_noise(0.5, 3.0)(scripted(down))

    def noise(key):
        return np.asarray(algorithm.train(down, (), ClientContext(0, (), 0, key)).upload["w"])

    first, second = noise(KEY), noise(jax.random.fold_in(KEY, 1))
    np.testing.assert_allclose([first.std(), first.mean()], [1.5, 0.0], atol=0.05)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    np.testing.assert_array_equal(first, noise(KEY))
    a, b = (np.asarray(leaf) for leaf in jax.tree.leaves(noised(1.0, 1.0, DOWN)))
    assert len({*a, *b}) == 3  # leaves have independent noise


def test_counters_and_masks_are_unchanged_and_variances_not_negative():
    stats = {"norm": {"mean": jnp.zeros(500), "var": jnp.zeros(500)}}
    upload = {"batch_stats": stats, "count": jnp.int32(7), "mask": jnp.array([True, False])}
    new = noised(1.0, 1.0, upload)
    assert (int(new["count"]), new["mask"].tolist()) == (7, [True, False])
    assert (np.asarray(new["batch_stats"]["norm"]["mean"]) < 0).any()
    variances = np.asarray(new["batch_stats"]["norm"]["var"])
    assert (variances >= 0).all()
    assert variances.any()


def test_groups_are_clipped_separately():
    pair = upload_noise(2.5, 0.0)(by_group((scripted(UP), scripted(DOWN))))
    uploads = [train(DOWN, (), ClientContext(0, (), 0, KEY)).upload for train in pair.train]
    np.testing.assert_allclose(flat(uploads[0]), [2.5, 1.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(flat(uploads[1]), flat(DOWN))


def test_settings_select_the_transform():
    def make(**settings):  # type: ignore[arg-type]
        return NOISE.make(settings.__getitem__, None)

    assert make(upload_clip_norm=None, upload_noise=0.0) is None
    with pytest.raises(UsageError, match=r"upload_noise is 0\.5 times upload_clip_norm, which is"):
        make(upload_clip_norm=None, upload_noise=0.5)
    algorithm = make(upload_clip_norm=2.5, upload_noise=0.0)(scripted(UP))
    new = algorithm.train(DOWN, (), ClientContext(0, (), 0, KEY)).upload
    np.testing.assert_allclose(flat(new), [2.5, 1.0, 0.0], rtol=1e-6)
