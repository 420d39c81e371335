"""The variant of Factorized-FL that compares changes of v."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.simulation import rounds
from tests import cases, tiny
from tests.algorithms.served import served

KEY, N = jax.random.key(3), tiny.CLIENTS


def make(**settings: Any) -> Any:
    training = cases.training(keep_optimizer=False)
    return algorithms.factorized_fl_moved(tiny.Net(), training, tiny.federated()[1], **settings)


def observed(algorithm: Any, state: State) -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(algorithm.observe)(state))


def served_v(algorithm: Any, state: State) -> np.ndarray:
    """Returns v of fc1 in the download of each client, [N, HIDDEN]."""

    def send(state: State, i: jax.Array) -> Any:
        payload = algorithm.send(state, ClientContext(i, None, jnp.int32(0), KEY))
        return payload["params"]["fc1"]["v"]

    return np.asarray(jax.jit(jax.vmap(send, (None, 0)))(state, np.arange(N)))[..., 0]


@pytest.mark.parametrize("share", ["u", "all"])
def test_weights_follow_changes_of_v(share):
    """ω is computed from cosines of d, the total change of v; σ_k is that of the best peer."""
    algorithm = make(share=share, tau=-1.0, scale=3.0, minimum=2)
    data, federation = tiny.federated()
    engine = rounds.make_rounds(algorithm, federation, cohort=N, max_rounds=1, evaluate_after=False)
    state = engine.init(KEY)
    np.testing.assert_array_equal(state.rows["moved"], 0)
    np.testing.assert_allclose(observed(algorithm, state)["weights"], 1 / N, rtol=1e-6)
    d = np.zeros((N, tiny.HIDDEN))
    for t in (0, 1):
        before = served_v(algorithm, state)
        state, (log,) = engine.run(KEY, state, data, jnp.int32(t), jnp.int32(1))
        d += np.asarray(state.rows["params"]["fc1"]["v"])[..., 0] - before
        np.testing.assert_allclose(state.rows["moved"], d, atol=1e-5)
    # From the stored change: division by its length would increase rounding errors.
    d = np.asarray(state.rows["moved"], np.float64)
    unit = d / np.linalg.norm(d, axis=1, keepdims=True)
    sigma = unit @ unit.T
    np.fill_diagonal(sigma, -1)
    np.fill_diagonal(sigma, sigma.max(1))
    omega = np.exp(3 * sigma) / np.exp(3 * sigma).sum(1, keepdims=True)
    state = jax.device_get(state)
    np.testing.assert_allclose(observed(algorithm, state)["weights"], omega, atol=1e-5)
    longer = state._replace(rows={**state.rows, "moved": 100 * state.rows["moved"]})
    np.testing.assert_allclose(observed(algorithm, longer)["weights"], omega, atol=1e-5)
    # The head is not factorised and is mixed.
    head = state.rows["params"]["fc2"]["kernel"]
    assert head.shape == (N, tiny.HIDDEN, tiny.CLASSES)
    model = served(algorithm, state, 2)["params"]["fc2"]["kernel"]
    np.testing.assert_allclose(model, np.tensordot(omega[2], head, 1), atol=1e-5)
    assert int(np.asarray(log.up["fc2"]).ravel()[0]) == 4 * (tiny.HIDDEN + 1) * tiny.CLASSES
