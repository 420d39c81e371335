"""pFedLA of many clients: whose models each of them mixes, worked out by hand."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms import candidates
from fedjax_pfl.algorithms.candidates import Candidates
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Cohort, Federation, State, Visit
from fedjax_pfl.core.errors import UsageError
from tests import cases, tiny

KEY = jax.random.key(5)


def federation(active: Any) -> Federation:
    active = np.array(active, bool)
    return Federation(np.ones(len(active), int), (1,), 1, active, np.zeros(len(active), int))


def first(active: Any, m: int) -> Candidates:
    return jax.jit(lambda key: candidates.first(federation(active), m, key))(KEY)


def test_first_candidates():
    """Each has itself and others, and is one of as many; who is not active comes last."""
    known = first(np.ones(9), 4)
    ids = np.asarray(known.ids)
    assert ids.shape == known.likeness.shape == (9, 4)
    assert (np.diff(ids) > 0).all()  # in order, and each once
    assert (ids == np.arange(9)[:, None]).any(1).all()
    np.testing.assert_array_equal(np.bincount(ids.ravel()), np.full(9, 4))

    some = np.array([1, 1, 0, 1, 0, 1, 0], bool)
    for m in (2, 5, 7):
        ids = np.asarray(first(some, m).ids)
        assert (np.diff(ids) > 0).all()
        for i, row in enumerate(ids):
            others = row[row != i]
            assert len(others) == m - 1
            assert some[others].sum() == min(m - 1, some.sum() - some[i])
    np.testing.assert_array_equal(ids, np.tile(np.arange(7), (7, 1)))
    assert candidates.first(federation(some), None, KEY) == ()


def test_who_comes_and_who_goes():
    """Of seven clients 1, 2 and 5 take part, 6 is asked and does not answer; 5 is novel to others.

    Changes (1, 0), (1, 1) and (0, 1): cosines .7071 of 1 with 2 and of 2 with 5, 0 of 1 with 5.
    """
    ids = jnp.array([[0, 1, 2], [0, 1, 3], [1, 2, 4], [0, 1, 3], [0, 1, 4], [3, 4, 5], [0, 1, 6]])
    likeness = jnp.full((7, 3), -2.0).at[1].set(jnp.array([0.1, -2.0, 0.9])).at[2, 2].set(0.8)
    known = Candidates(ids.astype(jnp.int32), likeness)
    payloads = {"params": {"w": jnp.ones((4, 2))}}
    moves = jnp.array([[1.0, 0], [1, 1], [0, 1], [5, 5]])
    uploads = {"params": {"w": 1 + moves}, "gradient": {"w": moves}}
    arrived = jnp.array([True, True, True, False])
    cohort = Cohort(jnp.array([1, 2, 5, 7]), arrived, jnp.ones(4), payloads, uploads, 0)
    new = candidates.after(known, cohort, federation([1, 1, 1, 1, 1, 0, 1]))
    root = np.sqrt(0.5)
    # Client 1 meets 2, which is more like it than 0 has been; 3 was more like it still.
    np.testing.assert_array_equal(new.ids[0], [2, 1, 3])
    np.testing.assert_allclose(new.likeness[0], [root, 1.0, 0.9], rtol=1e-6)
    # Client 2 sees 1 again, in its place, and does not take 5, which is not active.
    np.testing.assert_array_equal(new.ids[1], [1, 2, 4])
    np.testing.assert_allclose(new.likeness[1], [root, 1.0, 0.8], rtol=1e-6)
    # Client 5 is novel and takes both, 2 before 1: of its candidates it has met none.
    np.testing.assert_array_equal(new.ids[2], [2, 1, 5])
    np.testing.assert_allclose(new.likeness[2], [root, 0.0, 1.0], rtol=1e-6, atol=1e-7)


def test_only_candidates_are_mixed():
    """With weights of ln(1, 2, 3): a sixth, a third and a half of the three."""
    tiny_federation = tiny.federated()[1]
    made = cases.make("pfedla", tiny_federation, {"k": 0, "candidates": 3})
    state = made.init(KEY)
    rng = np.random.default_rng(0)

    def noise(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    def weigh(path: Any, leaf: jax.Array) -> jax.Array:
        if "head" in str(path[0]) and "bias" in str(path[1]):
            return jnp.broadcast_to(jnp.log(jnp.array([1.0, 2.0, 3.0])), leaf.shape)
        return jnp.zeros_like(leaf)

    ids = jnp.array([[0, 2, 5], *np.asarray(state.rows.candidates.ids)[1:]], jnp.int32)
    rows = state.rows._replace(
        theta=jax.tree.map(noise, state.rows.theta),
        psi=jax.tree_util.tree_map_with_path(weigh, state.rows.psi),
        candidates=state.rows.candidates._replace(ids=ids),
    )
    sent = made.send(State((), rows, ()), Visit(jnp.int32(0), None, jnp.int32(0), KEY))
    wanted = jax.tree.map(lambda x: x[0] / 6 + x[2] / 3 + x[5] / 2, rows.theta)
    chex.assert_trees_all_close(sent["params"], wanted, rtol=1e-6, atol=1e-6)
    shown = made.observe(state._replace(rows=rows))
    np.testing.assert_allclose(shown["alpha"][0, 0], [1 / 6, 1 / 3, 1 / 2], rtol=1e-6)
    np.testing.assert_array_equal(shown["candidates"], ids)
    assert trees.leaf_bytes(rows.psi["head000"]["kernel"]) == 6 * 100 * 3 * 4  # N · M, not N²


def test_all_of_them_are_the_published_method():
    """To rounding, as sums are of models that were gathered.

    Two rounds of what the server does, with uploads that are drawn.
    """
    everyone, ids = tiny.federated()[1], jnp.arange(tiny.CLIENTS)
    arrived = jnp.array([True, True, False, True, True, False])
    safe = jnp.where(arrived, ids, tiny.CLIENTS)
    ended = []
    for own in ({}, {"candidates": tiny.CLIENTS}):
        made = cases.make("pfedla", everyone, {"k": 1, **own})

        @jax.jit
        def server(rows: Any, t: jax.Array, made: Any = made) -> tuple[Any, Any]:
            state = State((), rows, ())
            payloads = jax.vmap(lambda i: made.send(state, Visit(i, None, t, KEY)))(ids)
            keys = iter(jax.random.split(jax.random.fold_in(KEY, t), 20))

            def drawn(leaf: jax.Array) -> jax.Array:
                return leaf + jax.random.normal(next(keys), leaf.shape)

            uploads = {k: jax.tree.map(drawn, payloads["params"]) for k in ("params", "gradient")}
            cohort = tiny.cohort(tiny.TRAIN, safe, arrived, payloads, uploads, t)
            return made.receive(state, cohort)[1], payloads

        rows = made.init(KEY).rows
        rows, first = server(rows, jnp.int32(0))
        ended.append((rows, first, server(rows, jnp.int32(1))))
    parts = [(one[0][:2], one[1], one[2][0][:2], one[2][1]) for one in ended]
    chex.assert_trees_all_close(*parts, rtol=1e-5, atol=1e-6)
    known = ended[1][2][0].candidates
    np.testing.assert_array_equal(known.ids, np.tile(np.arange(6), (6, 1)))
    here = np.flatnonzero(arrived)
    assert (np.asarray(known.likeness)[np.ix_(here, here)] > -2).all()


@pytest.mark.parametrize("m", [1, 7])
def test_there_are_two_to_n(m: int):
    with pytest.raises(UsageError, match=rf"pfedla.candidates is {m}; choose 2 to 6"):
        cases.make("pfedla", tiny.federated()[1], {"candidates": m})
