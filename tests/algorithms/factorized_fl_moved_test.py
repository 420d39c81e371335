"""The variant of Factorized-FL that compares how training has moved v."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation import rounds
from tests import cases, tiny
from tests.algorithms.served import after_rounds, served

KEY, N = jax.random.key(3), tiny.CLIENTS


def make(**own: Any) -> Any:
    training = cases.training(keep_optimizer=False)
    return algorithms.factorized_fl_moved(tiny.Net(), training, tiny.federated()[1], **own)


def observed(made: Any, state: State) -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(made.observe)(state))


def served_v(made: Any, state: State) -> np.ndarray:
    """v of fc1 as each client downloads it, [N, HIDDEN]."""

    def send(state: State, i: jax.Array) -> Any:
        return made.send(state, ClientContext(i, None, jnp.int32(0), KEY))["params"]["fc1"]["v"]

    return np.asarray(jax.jit(jax.vmap(send, (None, 0)))(state, np.arange(N)))[..., 0]


@pytest.mark.parametrize("share", ["u", "all"])
def test_weights_follow_the_movement_of_v(share):
    """d sums what each round moved; ω has its cosines, and no client is closer to itself than to
    its best peer."""
    made = make(share=share, tau=-1.0, scale=3.0, minimum=2)
    data, federation = tiny.federated()
    engine = rounds.make_rounds(made, federation, cohort=N, max_rounds=1, evaluate_after=False)
    state = engine.init(KEY)
    np.testing.assert_array_equal(state.rows["moved"], 0)
    np.testing.assert_allclose(observed(made, state)["weights"], 1 / N, rtol=1e-6)
    d = np.zeros((N, tiny.HIDDEN))
    for t in (0, 1):
        before = served_v(made, state)
        state, _ = engine.run(KEY, state, data, jnp.int32(t), jnp.int32(1))
        d += np.asarray(state.rows["params"]["fc1"]["v"])[..., 0] - before
        np.testing.assert_allclose(state.rows["moved"], d, atol=1e-5)
    # From the stored movement: its rounding, divided by its length, is the round's and not ω's.
    d = np.asarray(state.rows["moved"], np.float64)
    unit = d / np.linalg.norm(d, axis=1, keepdims=True)
    sigma = unit @ unit.T
    np.fill_diagonal(sigma, -1)
    np.fill_diagonal(sigma, sigma.max(1))
    omega = np.exp(3 * sigma) / np.exp(3 * sigma).sum(1, keepdims=True)
    state = jax.device_get(state)
    np.testing.assert_allclose(observed(made, state)["weights"], omega, atol=1e-5)
    longer = state._replace(rows={**state.rows, "moved": 100 * state.rows["moved"]})
    np.testing.assert_allclose(observed(made, longer)["weights"], omega, atol=1e-5)


@pytest.mark.parametrize("share", ["u", "all"])
def test_the_head_is_whole_and_mixed(share):
    made = make(share=share)
    state, log = after_rounds(made, 1)
    head = np.asarray(state.rows["params"]["fc2"]["kernel"])
    assert head.shape == (N, tiny.HIDDEN, tiny.CLASSES)
    weights = observed(made, state)["weights"]
    model = served(made, state, 2)["params"]["fc2"]["kernel"]
    np.testing.assert_allclose(model, np.tensordot(weights[2], head, 1), atol=1e-5)
    assert int(np.asarray(log.up["fc2"]).ravel()[0]) == 4 * (tiny.HIDDEN + 1) * tiny.CLASSES


def test_bad_settings_are_one_line():
    for own, words in (
        ({"share": "v"}, "all or u"),
        ({"minimum": N + 1}, "choose 1 to 6"),
        ({"sparsity": -1.0}, "at least 0"),
    ):
        with pytest.raises(UsageError, match=words):
            make(**own)
