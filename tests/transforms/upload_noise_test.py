"""Clipped and noised uploads: lengths by hand, whose draws they are, and what is left alone."""

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
# Changed by (3, 0) and −4, which is of length 5; the extra leaf came from nowhere.
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


def sent(clip_norm: float, multiplier: float, upload: Any = UP, key: jax.Array = KEY) -> Any:
    made = upload_noise(clip_norm, multiplier)(scripted(upload))
    trained = made.train(DOWN, (), ClientContext(0, (), 0, key))
    assert trained.variables is upload  # the client's own model is not noised
    return trained.upload


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("clip_norm", "wanted"), [(2.5, [2.5, 1.0, 0.0]), (5.0, [4, 1, -2]), (99.0, [4, 1, -2])]
)
def test_a_longer_change_is_scaled_down(clip_norm: float, wanted: list[float]):
    """All of it together: half of (3, 0, −4), or all."""
    np.testing.assert_allclose(flat(sent(clip_norm, 0.0)), wanted, rtol=1e-6)


def test_nothing_changed():
    np.testing.assert_array_equal(flat(sent(1.0, 0.0, DOWN)), flat(DOWN))


def test_noise_has_the_deviation_and_is_its_clients_own():
    """Of 20,000 numbers; the same key draws the same, another one others."""
    down = {"w": jnp.zeros(20_000)}
    made = upload_noise(0.5, 3.0)(scripted(down))

    def draw(key):
        return np.asarray(made.train(down, (), ClientContext(0, (), 0, key)).upload["w"])

    one, other = draw(KEY), draw(jax.random.fold_in(KEY, 1))
    np.testing.assert_allclose([one.std(), one.mean()], [1.5, 0.0], atol=0.05)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    np.testing.assert_array_equal(one, draw(KEY))
    a, b = (np.asarray(leaf) for leaf in jax.tree.leaves(sent(1.0, 1.0, DOWN)))
    assert len({*a, *b}) == 3  # leaves do not share draws


def test_what_is_no_real_number_travels_as_it_is_and_no_variance_is_negative():
    stats = {"norm": {"mean": jnp.zeros(500), "var": jnp.zeros(500)}}
    upload = {"batch_stats": stats, "count": jnp.int32(7), "mask": jnp.array([True, False])}
    got = sent(1.0, 1.0, upload)
    assert (int(got["count"]), got["mask"].tolist()) == (7, [True, False])
    assert (np.asarray(got["batch_stats"]["norm"]["mean"]) < 0).any()
    variances = np.asarray(got["batch_stats"]["norm"]["var"])
    assert (variances >= 0).all()
    assert variances.any()


def test_groups():
    pair = upload_noise(2.5, 0.0)(by_group((scripted(UP), scripted(DOWN))))
    both = [train(DOWN, (), ClientContext(0, (), 0, KEY)).upload for train in pair.train]
    np.testing.assert_allclose(flat(both[0]), [2.5, 1.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(flat(both[1]), flat(DOWN))


def test_settings():
    def ask(**given):  # type: ignore[arg-type]
        return NOISE.make(given.__getitem__, None)

    assert ask(upload_clip_norm=None, upload_noise=0.0) is None
    with pytest.raises(UsageError, match=r"upload_noise is 0\.5 times upload_clip_norm, which is"):
        ask(upload_clip_norm=None, upload_noise=0.5)
    made = ask(upload_clip_norm=2.5, upload_noise=0.0)(scripted(UP))
    got = made.train(DOWN, (), ClientContext(0, (), 0, KEY)).upload
    np.testing.assert_allclose(flat(got), [2.5, 1.0, 0.0], rtol=1e-6)
