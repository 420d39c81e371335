"""FedCAC: a server update against NumPy, and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.fedcac import Rows, collaborators
from fedjax_pfl.core.algorithm import ClientContext, State
from tests import tiny
from tests.algorithms import linear
from tests.algorithms.linear import KEY, deep

RNG = np.random.default_rng(1)
COUNTS = np.array([2, 5, 1, 4, 3])
GLOBAL = RNG.normal(size=(2, 2)), RNG.normal(size=(2, 3))
CUSTOMIZED = RNG.normal(size=(5, 2, 2)), RNG.normal(size=(5, 2, 3))
CRITICAL = RNG.random((5, 2, 2)) < 0.5, RNG.random((5, 2, 3)) < 0.5
TRAINED = RNG.normal(size=(5, 2, 2)), RNG.normal(size=(5, 2, 3))
ARRIVED = np.array([True, True, False, True, True])


def oracle(share, progress):
    """Returns downloads, new masks, u and θ, each a list with an array for both layers."""
    downloads = [
        np.where(m, u, g[None]) for m, u, g in zip(CRITICAL, CUSTOMIZED, GLOBAL, strict=True)
    ]
    masks = []
    for old, new in zip(downloads, TRAINED, strict=True):
        omega = np.abs((new - old) * new).reshape(5, -1)
        count = int(share * omega.shape[1])
        mask = np.zeros(omega.shape)
        for i in range(5):
            mask[i, np.argsort(-omega[i])[:count]] = 1
        masks.append(mask.reshape(new.shape))
    flat = np.concatenate([mask.reshape(5, -1) for mask in masks], 1)
    ids, n = np.flatnonzero(ARRIVED), flat[0].sum()
    overlap = {
        (i, j): 1 - np.abs(flat[i] - flat[j]).sum() / (2 * n) for i in ids for j in ids if i != j
    }
    mean, largest = np.mean(list(overlap.values())), max(overlap.values())
    threshold = mean + progress * (largest - mean)
    customized = [np.array(u) for u in CUSTOMIZED]
    for i in ids:
        group = [i, *(j for j in ids if j != i and overlap[i, j] >= threshold)]
        for u, new in zip(customized, TRAINED, strict=True):
            u[i] = new[group].mean(0)
    means = [np.average(new[ARRIVED], 0, COUNTS[ARRIVED]) for new in TRAINED]
    new_masks = [
        np.where(ARRIVED[:, None, None], mask, old)
        for mask, old in zip(masks, CRITICAL, strict=True)
    ]
    return downloads, new_masks, customized, means


def pair(tree):
    return linear.kernels({"params": tree})


def after(share, t, beta, begin):
    settings = {"critical_share": share, "alone_after": beta, "first_round": begin}
    algorithm, _ = linear.make_classifier("fedcac", **settings)
    stacked = Rows(
        deep(*CUSTOMIZED)["params"], jax.tree.map(lambda m: m > 0, deep(*CRITICAL)["params"])
    )
    state = State(deep(*GLOBAL), stacked, ())
    payloads = jax.vmap(lambda i: algorithm.send(state, ClientContext(i, None, t, KEY)))(
        jnp.arange(5)
    )
    ids = jnp.asarray(np.where(ARRIVED, np.arange(5), 5))
    cohort = tiny.cohort(COUNTS, ids, jnp.asarray(ARRIVED), payloads, deep(*TRAINED), t)
    return payloads, *jax.jit(algorithm.receive)(state, cohort)


@pytest.mark.parametrize(
    ("share", "t", "beta", "begin"), [(0.5, 0, 100, 0), (0.5, 24, 10, 20), (0.34, 30, 10, 0)]
)
def test_a_server_update_equals_numpy(share, t, beta, begin):
    """Rounds are counted from `begin`, the first of the phase."""
    payloads, server, rows = after(share, t, beta, begin)
    downloads, masks, customized, means = oracle(share, (t - begin + 1) / beta)
    for layer in (0, 1):
        np.testing.assert_allclose(pair(payloads["params"])[layer], downloads[layer], rtol=1e-6)
        np.testing.assert_array_equal(pair(rows.critical)[layer], masks[layer])
        np.testing.assert_allclose(pair(rows.customized)[layer], customized[layer], rtol=2e-6)
        np.testing.assert_allclose(pair(server["params"])[layer], means[layer], rtol=2e-6)


def test_clients_with_equal_masks_collaborate_in_every_round():
    masks = {"a": np.tile([True, False, True], (3, 1))}
    for progress in (0.0, 1.0, 7.0):
        groups = collaborators(masks, jnp.array([True, True, False]), jnp.float32(progress))
        np.testing.assert_array_equal(groups, [[1, 1, 0], [1, 1, 0], [0, 0, 1]])


def test_the_only_client_keeps_its_critical_parameters():
    groups = collaborators({"a": np.ones((2, 3), bool)}, jnp.array([True, False]), jnp.float32(0.5))
    np.testing.assert_array_equal(groups, np.eye(2))
