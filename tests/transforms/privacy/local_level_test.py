"""Tests of local privacy: clipped and noised uploads."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.transforms.privacy.local_level import local_privacy
from tests import cases, tiny

DATA, FEDERATION = tiny.federated()
DOWN = {"params": {"a": jnp.float32([1.0, 1.0]), "b": jnp.float32([2.0])}}
# The change is (3, 0) and −4, with norm 5.
UP = {"params": {"a": jnp.float32([4.0, 1.0]), "b": jnp.float32([-2.0])}}
KEY = jax.random.key(2)


def test_arguments_out_of_range_are_refused():
    for settings, line in (
        ({"clip_norm": -1.0}, "clip_norm is -1.0; it must be above 0"),
        ({"clip_norm": 1.0, "noise_multiplier": -1.0}, "noise_multiplier is -1.0; it must be at"),
        ({"clip_norm": math.inf, "noise_multiplier": 1.0}, "noise needs a finite clip_norm"),
    ):
        with pytest.raises(UsageError, match=f"^{line}"):
            local_privacy(DATA, **settings)


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
    transform = local_privacy(DATA, clip_norm=clip_norm, noise_multiplier=multiplier)
    result = transform(scripted(upload)).train(DOWN, (), ClientContext(0, (), 0, key))
    np.testing.assert_array_equal(flat(result.variables), flat(upload))  # trained without noise
    return result.upload


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("clip_norm", "expected"), [(2.5, [2.5, 1.0, 0.0]), (5.0, [4, 1, -2]), (99.0, [4, 1, -2])]
)
def test_larger_changes_are_scaled_down(clip_norm: float, expected: list[float]):
    np.testing.assert_allclose(flat(noised(clip_norm, 0.0)), expected, rtol=1e-6)
    np.testing.assert_array_equal(flat(noised(clip_norm, 0.0, DOWN)), flat(DOWN))  # no change


def test_noise_has_the_stated_variance_and_follows_the_key():
    upload = {"w": jnp.zeros(20_000)}

    def noise(key: jax.Array) -> np.ndarray:
        return np.asarray(noised(0.5, 3.0, upload, key)["w"], np.float64)

    first, second = noise(KEY), noise(jax.random.fold_in(KEY, 1))
    low, high = chi2.ppf([1e-4, 1 - 1e-4], first.size)
    assert low < np.sum(first**2) / 1.5**2 < high
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    np.testing.assert_array_equal(first, noise(KEY))
    a, b = (np.asarray(leaf) for leaf in jax.tree.leaves(noised(1.0, 1.0, DOWN)))
    assert len({*a, *b}) == 3  # leaves have independent noise


def test_variances_are_not_negative():
    stats = {"norm": {"mean": jnp.zeros(500), "var": jnp.zeros(500)}}
    new = noised(1.0, 1.0, {"batch_stats": stats})
    assert (np.asarray(new["batch_stats"]["norm"]["mean"]) < 0).any()
    variances = np.asarray(new["batch_stats"]["norm"]["var"])
    assert (variances >= 0).all()
    assert variances.any()


def test_an_upload_that_is_not_finite_becomes_noise_around_the_download():
    bad = {"params": {"a": jnp.float32([jnp.nan, 1.0]), "b": jnp.float32([2.0])}}
    transform = local_privacy(DATA, clip_norm=1.0, noise_multiplier=0.0)
    result = transform(scripted(bad)).train(DOWN, (), ClientContext(0, (), 0, KEY))
    np.testing.assert_array_equal(flat(result.upload), flat(DOWN))
    assert np.isfinite(flat(result.variables)).all()


def test_groups_are_clipped_separately():
    transform = local_privacy(DATA, clip_norm=2.5)
    pair = transform(by_group((scripted(UP), scripted(DOWN))))
    uploads = [train(DOWN, (), ClientContext(0, (), 0, KEY)).upload for train in pair.train]
    np.testing.assert_allclose(flat(uploads[0]), [2.5, 1.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(flat(uploads[1]), flat(DOWN))


REFUSED = {"fedgh", "fedmn", "fedmn_correlation", "fedpac", "fedproto", "fedtgp", "flute"}
REFUSED |= {"ifca", "local"}


@pytest.mark.slow("builds every method")
@pytest.mark.parametrize("name", cases.NAMES)
def test_uploads_that_noise_does_not_cover_are_refused(name: str):
    transform = local_privacy(DATA, clip_norm=1.0, noise_multiplier=1.0)
    if name not in REFUSED:
        transform(cases.make(name, FEDERATION))
        return
    with pytest.raises(UsageError, match=r"^local privacy is not possible here: [^\n]+$"):
        transform(cases.make(name, FEDERATION))
