"""Clustered-FL: linkage against SciPy, and splits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.clustered_fl import Clusters, bipartition
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext, Federation, State
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, T, variables, weights


def test_bipartition_equals_scipy():
    """Random symmetric distances with a random subset of members."""
    rng, run = np.random.default_rng(0), jax.jit(bipartition)
    for _ in range(40):
        distance = rng.random((9, 9)).astype(np.float32)
        distance = (distance + distance.T) / 2
        members = np.zeros(9, bool)
        members[rng.choice(9, rng.integers(2, 10), replace=False)] = True
        inner = distance[np.ix_(members, members)]
        np.fill_diagonal(inner, 0)
        label = fcluster(linkage(squareform(inner), "complete"), 2, "maxclust")
        expected = np.zeros(9, bool)
        expected[members] = label != label[0]
        np.testing.assert_array_equal(run(distance, members), expected)


COUNTS = np.array([1, 1, 1, 1, 3, 1])


def make(**settings):
    federation = Federation(COUNTS, (2,), 1, np.ones(6, bool), np.zeros(6, np.int32))
    settings = {"mean_below": 0.4, "longest_above": 1.6, "max_clusters": 3, **settings}
    training = local_training.sgd(steps=1)
    return algorithms.clustered_fl(linear.Linear(), training, federation, **settings)


def at(models, used, rows):
    stacked = {"params": {"fc": {"kernel": jnp.asarray(models, jnp.float32)[..., None]}}}
    return Clusters(stacked, jnp.int32(used)), jnp.asarray(rows, jnp.int32)


def receive(algorithm, server, rows, updates, arrived=None):
    """Returns the server state after uploads that differ from the downloads by `updates`."""
    ids, arrived = np.arange(6), np.array([True] * 6 if arrived is None else arrived)
    sent = jax.vmap(
        lambda i: algorithm.send(State(server, rows, ()), ClientContext(i, None, T, KEY))
    )(jnp.asarray(ids))
    kernel = sent["params"]["fc"]["kernel"] + jnp.asarray(updates, jnp.float32)[..., None]
    uploads = {"params": {"fc": {"kernel": jnp.where(arrived[:, None, None], kernel, 0)}}}
    safe = jnp.asarray(np.where(arrived, ids, 6))
    cohort = tiny.cohort(COUNTS, safe, jnp.asarray(arrived), sent, uploads, T)
    return jax.jit(algorithm.receive)(State(server, rows, ()), cohort)


OPPOSITE = [[2, 0], [-2, 0.1], [2, 0.1], [-2, 0], [0.1, 0], [0, 0]]  # the mean is about 0


def test_a_second_split_keeps_cluster_ids():
    algorithm = make()
    server, rows = receive(algorithm, *at([[1, 1], [0, 0], [0, 0]], 1, [0] * 6), OPPOSITE)
    np.testing.assert_array_equal(rows, [0, 1, 0, 1, rows[4], rows[5]])
    assert int(server.used) == 2
    means = [  # of each part's own members
        np.average(np.array(OPPOSITE)[rows == part], 0, COUNTS[rows == part]) + 1 for part in (0, 1)
    ]
    np.testing.assert_allclose(weights(server.models)[:2], means, rtol=1e-5)
    assert abs(means[0][0] - means[1][0]) > 2
    server, rows = at([[1, 1], [5, 5], [0, 0]], 2, [0, 1, 0, 1, 1, 1])
    # Now cluster 1 splits. The updates of cluster 0 agree.
    updates = [[1, 0], [0, 2], [1, 0], [0, -2], [0, 0.1], [0, -0.4]]
    server, rows = receive(algorithm, server, rows, updates)
    np.testing.assert_array_equal(rows, [0, 1, 0, 2, 1, 2])
    assert int(server.used) == 3
    models = weights(server.models)
    np.testing.assert_allclose(models[0], [2, 1], rtol=1e-6)
    shares = [(2 * 1 + 0.1 * 3) / 4, (-2 * 1 - 0.4 * 1) / 2]
    np.testing.assert_allclose(models[1:], [[5, 5 + share] for share in shares], rtol=1e-5)
    again, same_rows = receive(algorithm, server, rows, updates)  # there is no free cluster
    np.testing.assert_array_equal(same_rows, rows)
    assert int(again.used) == 3


@pytest.mark.parametrize(
    ("changes", "updates", "arrived"),
    [
        ({"longest_above": 2.5}, OPPOSITE, [True] * 6),
        ({"mean_below": 1e-3}, OPPOSITE, [True] * 6),
        ({}, OPPOSITE, [True] * 2 + [False] * 4),  # two members arrived
        ({"max_clusters": 1}, OPPOSITE, [True] * 6),
    ],
)
def test_no_split(changes, updates, arrived):
    algorithm = make(**changes)
    state = at([[1, 1], [0, 0], [0, 0]][: changes.get("max_clusters", 3)], 1, [0] * 6)
    server, rows = receive(algorithm, *state, updates, arrived=arrived)
    assert int(server.used) == 1
    assert not rows.any()
    share = COUNTS * np.array(arrived)
    expected = 1 + np.average(np.array(updates), 0, share)
    np.testing.assert_allclose(weights(server.models)[0], expected, rtol=1e-5)


def test_empty_clusters_absent_members_and_phases():
    algorithm = make()
    state = at([[1, 1], [7, 7], [0, 0]], 2, [0, 0, 0, 0, 1, 0])
    arrived = [True] * 4 + [False] * 2
    server, rows = receive(algorithm, *state, OPPOSITE, arrived=arrived)
    np.testing.assert_array_equal(weights(server.models)[1], [7, 7])
    np.testing.assert_array_equal(rows, [0, 2, 0, 2, 1, 0])
    # A phase continues the clusters or starts from a global model.
    earlier = State(server, rows, ())
    continued = algorithm.init(KEY, earlier)
    chex.assert_trees_all_equal(continued, earlier)
    served = algorithm.personalize(continued, (), ClientContext(4, None, T, KEY))
    np.testing.assert_array_equal(weights(served), [7, 7])
    start = State(variables([3.0, 4.0]), (), ())
    np.testing.assert_array_equal(weights(algorithm.init(KEY, start).server.models)[0], [3, 4])
