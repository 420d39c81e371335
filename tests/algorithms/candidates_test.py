"""Candidates of pFedLA."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.pfedla import candidates
from fedjax_pfl.algorithms.pfedla.candidates import CandidateTable
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext, Cohort, Federation, State
from tests import cases, tiny

pytestmark = pytest.mark.slow("programs with and without candidates")

KEY = jax.random.key(5)


def federation(active: Any) -> Federation:
    active = np.array(active, bool)
    return Federation(np.ones(len(active), int), (1,), 1, active, np.zeros(len(active), int))


def initial_candidates(active: Any, m: int) -> CandidateTable:
    return jax.jit(lambda key: candidates.initial_table(federation(active), m, key))(KEY)


def test_initial_candidates():
    """A row contains its client; each active client is in the same number of rows."""
    table = initial_candidates(np.ones(9), 4)
    ids = np.asarray(table.client_ids)
    assert ids.shape == table.similarity.shape == (9, 4)
    assert (np.diff(ids) > 0).all()  # in order, and each once
    assert (ids == np.arange(9)[:, None]).any(1).all()
    np.testing.assert_array_equal(np.bincount(ids.ravel()), np.full(9, 4))

    active = np.array([1, 1, 0, 1, 0, 1, 0], bool)
    for m in (2, 5, 7):
        ids = np.asarray(initial_candidates(active, m).client_ids)
        assert (np.diff(ids) > 0).all()
        for i, row in enumerate(ids):
            peers = row[row != i]
            assert len(peers) == m - 1
            assert active[peers].sum() == min(m - 1, active.sum() - active[i])
    np.testing.assert_array_equal(ids, np.tile(np.arange(7), (7, 1)))
    assert candidates.initial_table(federation(active), None, KEY) == ()


def test_the_most_similar_clients_replace_others():
    """Clients 1, 2 and 5 take part, one drops out; 5 is held out.

    Updates (1, 0), (1, 1) and (0, 1): cosines 0.7071 of 1 with 2 and of 2 with 5, 0 of 1 with 5.
    """
    ids = jnp.array([[0, 1, 2], [0, 1, 3], [1, 2, 4], [0, 1, 3], [0, 1, 4], [3, 4, 5], [0, 1, 6]])
    similarity = jnp.full((7, 3), -2.0).at[1].set(jnp.array([0.1, -2.0, 0.9])).at[2, 2].set(0.8)
    table = CandidateTable(ids.astype(jnp.int32), similarity)
    payloads = {"params": {"w": jnp.ones((4, 2))}}
    moves = jnp.array([[1.0, 0], [1, 1], [0, 1], [5, 5]])
    uploads = {"params": {"w": 1 + moves}}
    arrived = jnp.array([True, True, True, False])
    cohort = Cohort(jnp.array([1, 2, 5, 7]), arrived, jnp.ones(4), payloads, uploads, 0)
    new = candidates.updated_rows(table, cohort, federation([1, 1, 1, 1, 1, 0, 1]))
    root = np.sqrt(0.5)
    # Client 1 replaces 0 by 2, which is more similar; 3 is more similar still.
    np.testing.assert_array_equal(new.client_ids[0], [2, 1, 3])
    np.testing.assert_allclose(new.similarity[0], [root, 1.0, 0.9], rtol=1e-6)
    # Client 2 compares itself with 1 again and does not add 5, which is held out.
    np.testing.assert_array_equal(new.client_ids[1], [1, 2, 4])
    np.testing.assert_allclose(new.similarity[1], [root, 1.0, 0.8], rtol=1e-6)
    # Client 5 is held out and adds both, 2 before 1: it was never compared with 3 and 4.
    np.testing.assert_array_equal(new.client_ids[2], [2, 1, 5])
    np.testing.assert_allclose(new.similarity[2], [root, 0.0, 1.0], rtol=1e-6, atol=1e-7)


def test_only_candidates_are_mixed():
    """Raw weights ln 1, ln 2 and ln 3 give alpha = 1/6, 1/3 and 1/2."""
    tiny_federation = tiny.federated()[1]
    algorithm = cases.make("pfedla", tiny_federation, {"k": 0, "candidates": 3})
    state = algorithm.init(KEY)
    rng = np.random.default_rng(0)

    def noise(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    def weigh(path: Any, leaf: jax.Array) -> jax.Array:
        if "head" in str(path[0]) and "bias" in str(path[1]):
            return jnp.broadcast_to(jnp.log(jnp.array([1.0, 2.0, 3.0])), leaf.shape)
        return jnp.zeros_like(leaf)

    ids = jnp.array([[0, 2, 5], *np.asarray(state.rows.candidates.client_ids)[1:]], jnp.int32)
    rows = state.rows._replace(
        theta=jax.tree.map(noise, state.rows.theta),
        psi=jax.tree_util.tree_map_with_path(weigh, state.rows.psi),
        candidates=state.rows.candidates._replace(client_ids=ids),
    )
    sent = algorithm.send(State((), rows, ()), ClientContext(jnp.int32(0), None, jnp.int32(0), KEY))
    expected = jax.tree.map(lambda x: x[0] / 6 + x[2] / 3 + x[5] / 2, rows.theta)
    chex.assert_trees_all_close(sent["params"], expected, rtol=1e-5, atol=1e-5)
    diagnostics = algorithm.observe(state._replace(rows=rows))
    np.testing.assert_allclose(diagnostics["alpha"][0, 0], [1 / 6, 1 / 3, 1 / 2], rtol=1e-6)
    np.testing.assert_array_equal(diagnostics["candidates"], ids)
    assert trees.leaf_bytes(rows.psi["head000"]["kernel"]) == 6 * 100 * 3 * 4  # N · M, not N²


def test_all_clients_as_candidates_equal_the_papers_method():
    """Two server updates with random uploads; equal up to rounding."""
    federation_all, ids = tiny.federated()[1], jnp.arange(tiny.CLIENTS)
    arrived = jnp.array([True, True, False, True, True, False])
    arrived_ids = jnp.where(arrived, ids, tiny.CLIENTS)
    outcomes = []
    for settings in ({}, {"candidates": tiny.CLIENTS}):
        algorithm = cases.make("pfedla", federation_all, {"k": 1, **settings})

        @jax.jit
        def update(rows: Any, t: jax.Array, algorithm: Any = algorithm) -> tuple[Any, Any]:
            state = State((), rows, ())
            send = jax.vmap(lambda i: algorithm.send(state, ClientContext(i, None, t, KEY)))
            payloads = send(ids)
            key = jax.random.fold_in(KEY, t)
            uploads = jax.tree.map(
                lambda x: x + jax.random.normal(key, x.shape), payloads["params"]
            )
            uploads = {"params": uploads}
            cohort = tiny.cohort(tiny.TRAIN, arrived_ids, arrived, payloads, uploads, t)
            return algorithm.receive(state, cohort)[1], payloads

        first = update(algorithm.init(KEY).rows, jnp.int32(0))
        outcomes.append((first, update(first[0], jnp.int32(1))))
    parts = [[(rows[:2], sent) for rows, sent in updates] for updates in outcomes]
    chex.assert_trees_all_close(*parts, rtol=1e-5, atol=1e-5)
    table = outcomes[1][1][0].candidates
    np.testing.assert_array_equal(table.client_ids, np.tile(np.arange(6), (6, 1)))
    present = np.flatnonzero(arrived)
    assert (np.asarray(table.similarity)[np.ix_(present, present)] > -2).all()
