"""What a cohort does with those that did not arrive."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.examples import client_data
from tests import cases, tiny

HERE = jnp.array([True, False, True])
IDS = jnp.array([4, 6, 1])
UPLOADS = {"w": jnp.array([[2.0, 0.0], [1e30, jnp.nan], [6.0, 4.0]])}


def cohort(counts, here=HERE, ids=IDS):
    return tiny.cohort(counts, ids, here, (), UPLOADS, 0)


def test_the_mean_is_over_those_that_arrived():
    """(1 · 2 + 3 · 6) / 4 and 3 · 4 / 4; without weights 8 / 2 and 4 / 2."""
    one = cohort([0, 3, 0, 0, 1, 0])
    np.testing.assert_array_equal(one.weights, [1, 0, 3])
    old = {"w": jnp.array([7.0, 7.0])}
    np.testing.assert_allclose(one.mean(UPLOADS, old)["w"], [5, 3])
    np.testing.assert_allclose(one.mean(UPLOADS, old, one.arrived)["w"], [4, 2])
    np.testing.assert_allclose(one.mean(UPLOADS, old, jnp.ones(3))["w"], [4, 2])


def test_without_examples_the_old_value_stays():
    old = {"w": jnp.array([7.0, 8.0])}
    for one in (cohort([0] * 6), cohort([1] * 6, ~HERE | ~HERE, jnp.array([6, 6, 6]))):
        kept = one.mean(UPLOADS, old, jnp.zeros(3))
        np.testing.assert_array_equal(kept["w"], [7, 8])
    np.testing.assert_array_equal(cohort([0] * 6).mean(UPLOADS, old)["w"], [7, 8])


def test_rows_are_written_for_those_that_arrived():
    one, rows = cohort([1] * 6), {"w": jnp.zeros((6, 2))}
    got = one.put(rows, UPLOADS)["w"]
    np.testing.assert_array_equal(got[jnp.array([4, 1])], [[2, 0], [6, 4]])
    assert not got[jnp.array([0, 2, 3, 5])].any()
    np.testing.assert_array_equal(one.present(UPLOADS)["w"], [[2, 0], [0, 0], [6, 4]])


@pytest.mark.slow("a program for each of six methods")
@pytest.mark.parametrize(
    "name", ["fedavg", "per_fedavg", "fedrep", "fedem", "fedmn", "clustered_fl"]
)
def test_where_only_clients_without_examples_arrive_the_server_stays(name):
    """A mean over no examples is 0 / 0, and the model would be NaN for good."""
    data, federation = tiny.federated()
    made, key = cases.make(name, federation), jax.random.key(0)
    state = jax.jit(made.init)(key)

    def ctx(state):
        payload = made.send(state, ClientContext(0, None, 0, key))
        client = jax.tree.map(lambda leaf: leaf[0], state.clients)
        return payload, made.train(
            payload, client, ClientContext(0, client_data(data, 0), 0, key)
        ).upload

    shapes = jax.eval_shape(ctx, state)
    payloads, uploads = jax.tree.map(lambda s: jnp.ones((2, *s.shape), s.dtype), shapes)
    here = tiny.cohort(np.zeros(6), jnp.arange(2), jnp.ones(2, bool), payloads, uploads, 0)
    server, _ = jax.jit(made.receive)(State(state.server, state.rows, ()), here)
    chex.assert_trees_all_equal(server, state.server)
