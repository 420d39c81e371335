"""Clustered-FL: linkage against scipy, and splits by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.clustered_fl import Clusters, bipartition, products
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import ClientContext, Federation, State
from fedjax_pfl.core.errors import UsageError
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, variables, weights


def test_linkage_is_scipys():
    """Random symmetric matrices of which only some places are members."""
    rng, run = np.random.default_rng(0), jax.jit(bipartition)
    for _ in range(40):
        distance = rng.random((9, 9)).astype(np.float32)
        distance = (distance + distance.T) / 2
        members = np.zeros(9, bool)
        members[rng.choice(9, rng.integers(2, 10), replace=False)] = True
        inner = distance[np.ix_(members, members)]
        np.fill_diagonal(inner, 0)
        label = fcluster(linkage(squareform(inner), "complete"), 2, "maxclust")
        wanted = np.zeros(9, bool)
        wanted[members] = label != label[0]
        np.testing.assert_array_equal(run(distance, members), wanted)


def test_products_of_updates():
    deltas = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([[[1.0]], [[-2.0]]])}
    np.testing.assert_allclose(products(deltas), [[6, 12], [12, 54]])


COUNTS = np.array([1, 1, 1, 1, 3, 1])


def make(**own):
    federation = Federation(COUNTS, (2,), 1, np.ones(6, bool), np.zeros(6, np.int32))
    settings = {"mean_below": 0.4, "longest_above": 1.6, "max_clusters": 3, **own}
    training = local_training.sgd(steps=1)
    return algorithms.clustered_fl(linear.Linear(), training, federation, **settings)


def at(models, used, rows):
    stacked = {"params": {"fc": {"kernel": jnp.asarray(models, jnp.float32)[..., None]}}}
    return Clusters(stacked, jnp.int32(used)), jnp.asarray(rows, jnp.int32)


def meet(made, server, rows, updates, ids=range(6), here=None):
    """One `receive` of clients whose models moved by `updates`."""
    ids, here = np.array(ids), np.ones(len(updates), bool) if here is None else np.array(here)
    sent = jax.vmap(lambda i: made.send(State(server, rows, ()), ClientContext(i, None, T, KEY)))(
        jnp.asarray(ids)
    )
    kernel = sent["params"]["fc"]["kernel"] + jnp.asarray(updates, jnp.float32)[..., None]
    uploads = {"params": {"fc": {"kernel": jnp.where(here[:, None, None], kernel, 0)}}}
    safe = jnp.asarray(np.where(here, ids, 6))
    cohort = tiny.cohort(COUNTS, safe, jnp.asarray(here), sent, uploads, T)
    return jax.jit(made.receive)(State(server, rows, ()), cohort)


APART = [[2, 0], [-2, 0.1], [2, 0.1], [-2, 0], [0.1, 0], [0, 0]]  # the mean is about 0


def test_a_split_by_the_rule_and_a_second_one_keeps_numbers():
    made = make()
    server, rows = meet(made, *at([[1, 1], [0, 0], [0, 0]], 1, [0] * 6), APART)
    np.testing.assert_array_equal(rows, [0, 1, 0, 1, rows[4], rows[5]])
    assert int(server.used) == 2
    mean = np.average(np.array(APART), 0, COUNTS) + 1  # of all, before they part
    models = weights(server.models)
    np.testing.assert_allclose(models[:2], [mean, mean], rtol=1e-5)
    server, rows = at([[1, 1], [5, 5], [0, 0]], 2, [0, 1, 0, 1, 1, 1])
    # Now cluster 1 splits; cluster 0 agrees with itself and moves on.
    updates = [[1, 0], [0, 2], [1, 0], [0, -2], [0, 0.1], [0, -0.4]]
    server, rows = meet(made, server, rows, updates)
    np.testing.assert_array_equal(rows, [0, 1, 0, 2, 1, 2])
    assert int(server.used) == 3
    models = weights(server.models)
    np.testing.assert_allclose(models[0], [2, 1], rtol=1e-6)
    share = np.array([2 * 1 - 2 * 1 + 0.1 * 3 - 0.4 * 1]) / 6
    np.testing.assert_allclose(models[1:], [[5, 5 + share[0]]] * 2, rtol=1e-5)
    again, same = meet(made, server, rows, updates)  # no place is left
    np.testing.assert_array_equal(same, rows)
    assert int(again.used) == 3


@pytest.mark.parametrize(
    ("changes", "updates", "here"),
    [
        ({"longest_above": 2.5}, APART, [True] * 6),
        ({"mean_below": 1e-3}, APART, [True] * 6),
        ({}, APART, [True, True, False, False, False, False]),  # two members answered
        ({"max_clusters": 1}, APART, [True] * 6),
        ({}, [[2, 0]] * 6, [True] * 6),  # all agree, and the mean is long
    ],
)
def test_no_split(changes, updates, here):
    made = make(**changes)
    state = at([[1, 1], [0, 0], [0, 0]][: changes.get("max_clusters", 3)], 1, [0] * 6)
    server, rows = meet(made, *state, updates, here=here)
    assert int(server.used) == 1
    assert not rows.any()
    share = COUNTS * np.array(here)
    wanted = 1 + np.average(np.array(updates), 0, share)
    np.testing.assert_allclose(weights(server.models)[0], wanted, rtol=1e-5)


def test_an_empty_cluster_and_absent_members_stay():
    made = make()
    state = at([[1, 1], [7, 7], [0, 0]], 2, [0, 0, 0, 0, 1, 0])
    here = [True, True, True, True, False, False]
    server, rows = meet(made, *state, APART, here=here)
    np.testing.assert_array_equal(weights(server.models)[1], [7, 7])
    np.testing.assert_array_equal(rows, [0, 2, 0, 2, 1, 0])


def test_a_start_from_a_global_model_or_its_own_kind():
    made = make()
    plain = State(variables([3.0, 4.0]), (), ())
    begun = made.init(KEY, plain)
    np.testing.assert_array_equal(weights(begun.server.models)[0], [3, 4])
    own = begun._replace(rows=jnp.arange(6) % 2, server=begun.server._replace(used=jnp.int32(2)))
    again = made.init(KEY, own)
    np.testing.assert_array_equal(again.rows, own.rows)
    assert int(again.server.used) == 2
    served = made.personalize(own, (), ClientContext(1, None, T, KEY))
    np.testing.assert_array_equal(weights(served), weights(trees.row(own.server.models, 1)))


def test_wrong_settings():
    with pytest.raises(UsageError, match="at least 1"):
        make(max_clusters=0)
