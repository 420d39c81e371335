"""Cohorts ignore absent clients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import algorithm
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.examples import client_data
from tests import cases, tiny

ARRIVED = jnp.array([True, False, True])
IDS = jnp.array([4, 6, 1])
UPLOADS = {"w": jnp.array([[2.0, 0.0], [1e30, jnp.nan], [6.0, 4.0]])}


def make_cohort(counts, arrived=ARRIVED, ids=IDS):
    return tiny.cohort(counts, ids, arrived, (), UPLOADS, 0)


def test_mean_over_clients_that_arrived():
    """(1 · 2 + 3 · 6) / 4 and 3 · 4 / 4; without weights 8 / 2 and 4 / 2."""
    cohort = make_cohort([0, 3, 0, 0, 1, 0])
    np.testing.assert_array_equal(cohort.weights, [1, 0, 3])
    old = {"w": jnp.array([7.0, 7.0])}
    np.testing.assert_allclose(cohort.mean(UPLOADS, old)["w"], [5, 3])
    np.testing.assert_allclose(cohort.mean(UPLOADS, old, cohort.arrived)["w"], [4, 2])
    np.testing.assert_allclose(cohort.mean(UPLOADS, old, jnp.ones(3))["w"], [4, 2])


def test_mean_without_examples_is_the_old_value():
    old = {"w": jnp.array([7.0, 8.0])}
    for cohort in (
        make_cohort([0] * 6),
        make_cohort([1] * 6, ~ARRIVED | ~ARRIVED, jnp.array([6, 6, 6])),
    ):
        mean = cohort.mean(UPLOADS, old, jnp.zeros(3))
        np.testing.assert_array_equal(mean["w"], [7, 8])
    np.testing.assert_array_equal(make_cohort([0] * 6).mean(UPLOADS, old)["w"], [7, 8])


def test_put_writes_rows_of_clients_that_arrived():
    cohort, rows = make_cohort([1] * 6), {"w": jnp.zeros((6, 2))}
    rows = cohort.put(rows, UPLOADS)["w"]
    np.testing.assert_array_equal(rows[jnp.array([4, 1])], [[2, 0], [6, 4]])
    assert not rows[jnp.array([0, 2, 3, 5])].any()
    np.testing.assert_array_equal(cohort.present(UPLOADS)["w"], [[2, 0], [0, 0], [6, 4]])


def test_update_changes_every_row_once_in_overlapping_blocks(monkeypatch):
    """Blocks have two of three slots, so the second slot is in both."""
    monkeypatch.setattr(algorithm, "_BLOCK", 2)
    rows, factors = {"w": jnp.arange(12.0).reshape(6, 2)}, jnp.array([[1.0], [2.0], [4.0]])
    everyone = make_cohort([1] * 6)._replace(
        ids=jnp.array([4, 2, 1]), arrived=jnp.ones(3, bool), uploads=()
    )

    def update(row, x, factor):
        return {"w": 10 * row["w"] + factor * x}

    for arrived in (everyone.arrived, jnp.array([True, False, True])):
        cohort = everyone._replace(arrived=arrived, ids=jnp.where(arrived, everyone.ids, 6))
        expected = np.array(rows["w"])
        for slot in np.flatnonzero(arrived):
            i = int(cohort.ids[slot])
            expected[i] = 10 * expected[i] + factors[slot] * UPLOADS["w"][slot]
        updated = cohort.update(rows, update, UPLOADS["w"], factors)
        np.testing.assert_array_equal(updated["w"], expected)


def test_map_equals_a_loop_in_blocks(monkeypatch):
    """Three clients in two blocks of two, which overlap."""
    monkeypatch.setattr(algorithm, "_LARGE_BLOCK", 2)
    step = jnp.array([[1.0], [2.0], [4.0]])
    result = make_cohort([1] * 6).map(
        lambda upload, factor: {"w": factor * upload["w"], "sum": upload["w"].sum()}, UPLOADS, step
    )
    w = np.asarray(UPLOADS["w"])
    np.testing.assert_array_equal(result["w"], w * np.asarray(step))
    np.testing.assert_array_equal(result["sum"], w.sum(1))


@pytest.mark.slow("a program for each of six methods")
@pytest.mark.parametrize(
    "name", ["fedavg", "per_fedavg", "fedrep", "fedem", "fedmn", "clustered_fl"]
)
def test_server_is_unchanged_if_only_clients_without_examples_arrive(name):
    """A mean over no examples is 0 / 0, and the model would be NaN for good."""
    data, federation = tiny.federated()
    method, key = cases.make(name, federation), jax.random.key(0)
    state = jax.jit(method.init)(key)

    def train(state):
        payload = method.send(state, ClientContext(0, None, 0, key))
        client = jax.tree.map(lambda leaf: leaf[0], state.clients)
        return payload, method.train(
            payload, client, ClientContext(0, client_data(data, 0), 0, key)
        ).upload

    shapes = jax.eval_shape(train, state)
    payloads, uploads = jax.tree.map(lambda s: jnp.ones((2, *s.shape), s.dtype), shapes)
    results = tiny.cohort(np.zeros(6), jnp.arange(2), jnp.ones(2, bool), payloads, uploads, 0)
    server, _ = jax.jit(method.receive)(State(state.server, state.rows, ()), results)
    chex.assert_trees_all_equal(server, state.server)
