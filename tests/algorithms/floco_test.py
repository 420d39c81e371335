"""Floco against NumPy, on the network (x A) B with three endpoints of B."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.floco import (
    floco,
    make_projection,
    place,
    principal_components,
    riesz_energy,
    sample_point,
)
from fedjax_pfl.core import local_training, optimizers, trees
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

RATE, STEPS, M = 0.2, 3, 3
HEADS = np.stack([HEAD, -HEAD, HEAD[:, ::-1]])
CENTRE, RADIUS = np.array([0.6, 0.4, 0.0], np.float32), np.float32(0.3)
RNG = np.random.default_rng(0)


def projected(y):
    """Returns the nearest point of the simplex, by bisection of the threshold."""
    low, high = y.min() - 1, y.max()
    for _ in range(100):
        threshold = (low + high) / 2
        is_low = np.maximum(y - threshold, 0).sum() > 1
        low, high = (threshold, high) if is_low else (low, threshold)
    return np.maximum(y - low, 0)


def test_one_round_by_hand():
    algorithm, data = linear.make_classifier("floco", endpoints=M)
    payload = {**deep(A, HEADS), "centre": jnp.asarray(CENTRE), "radius": jnp.asarray(RADIUS)}
    result = train_client(algorithm, payload, (), data)
    noise_key = jax.random.split(linear.KEY)[1]
    a, heads, losses = A, HEADS, []
    for step in range(STEPS):
        key = jax.random.fold_in(jax.random.fold_in(noise_key, step), 2)
        alpha = np.asarray(sample_point(key, CENTRE, RADIUS), np.float64)
        z, head = X @ a, np.tensordot(alpha, heads, 1)
        probabilities = linear.softmax(z @ head)
        losses.append(-np.mean(np.log(probabilities[np.arange(4), Y])))
        error = (probabilities - np.eye(3)[Y]) / 4
        a, heads = (
            a - RATE * X.T @ error @ head.T,
            heads - RATE * alpha[:, None, None] * (z.T @ error)[None],
        )
    body, uploaded = kernels(result.upload)
    np.testing.assert_allclose(body, a, rtol=1e-6)
    np.testing.assert_allclose(uploaded, heads, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(result.metrics["loss"], np.mean(losses), rtol=4e-7)
    served = np.tensordot(CENTRE, heads, 1)
    np.testing.assert_allclose(kernels(result.variables)[1], served, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("mask", "bias"), [(None, 0.5), (optimizers.matrices, 1.0)])
def test_biases_of_endpoints_decay_only_if_vectors_do(mask, bias):
    """The model has no loss, so a step only halves what decays."""
    data, federation = linear.federated([np.zeros((2, 2))], [np.ones(2)])
    optimizer = optimizers.sgd(0.0, 0.5, mask)
    training = local_training.make_training(optimizer, learning_rate=1.0, batch_size=2, epochs=1)
    algorithm = floco(linear.TwoLayers(), training, federation, endpoints=M)
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    payload["params"]["fc2"] = {"kernel": jnp.ones((M, 2, 1)), "bias": jnp.ones((M, 1))}
    trained = train_client(algorithm, payload, (), data).upload["params"]["fc2"]
    np.testing.assert_allclose(trained["kernel"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(trained["bias"], bias, rtol=1e-6)


def test_points_are_uniform_in_the_simplex_and_stay_in_the_region():
    def sample(centre, radius):
        keys = jax.random.split(linear.KEY, 100_000)
        return np.asarray(jax.vmap(sample_point, (0, None, None))(keys, centre, radius))

    simplex_points = sample(jnp.full(M, 1 / M), jnp.float32(2.0))
    # A uniform point has coordinates with mean 1/3 and variance 1/18.
    np.testing.assert_allclose(simplex_points.mean(0), 1 / 3, atol=0.0075)
    np.testing.assert_allclose(simplex_points.var(0), 1 / 18, atol=0.003)
    region = sample(CENTRE, RADIUS)
    for points in (simplex_points, region):
        np.testing.assert_allclose(points.sum(1), 1, rtol=3e-6)
        assert points.min() >= -1e-7
    assert np.abs(region - CENTRE).sum(1).max() < RADIUS + 1e-6
    np.testing.assert_array_equal(sample(CENTRE, jnp.float32(0.0))[0], CENTRE)


def test_principal_components_against_singular_values():
    signals, has_signal = RNG.normal(size=(6, 20)), np.array([1, 1, 0, 1, 1, 1], bool)
    signals[2] = np.nan
    mean = signals[has_signal].mean(0)
    loadings = np.linalg.svd(signals[has_signal] - mean, full_matrices=False)[2][:4]
    loadings *= np.sign(loadings[np.arange(4), np.abs(loadings).argmax(1)])[:, None]
    expected = np.zeros((8, 20))  # five centred signals have rank 4
    expected[:4] = loadings
    got = principal_components(jnp.float32(signals), jnp.asarray(has_signal), 8)
    np.testing.assert_allclose(got[0], mean, rtol=4e-6, atol=4e-7)
    np.testing.assert_allclose(got[1], expected, rtol=4e-5, atol=4e-6)


def test_clients_are_placed_at_the_scale_of_least_energy():
    signals, has_signal = RNG.normal(size=(5, 9)) * 0.2, np.array([1, 1, 1, 1, 0], bool)
    mean = signals[:4].mean(0)
    loadings = np.linalg.svd(signals[:4] - mean)[2][:M]
    loadings *= np.sign(loadings[np.arange(M), np.abs(loadings).argmax(1)])[:, None]
    scores = (signals - mean) @ loadings.T

    def energy(points):
        pairs = [(j, k) for k in range(4) for j in range(k)]
        return sum(1 / max(np.sum((points[j] - points[k]) ** 2), 1e-8) for j, k in pairs)

    candidates = [
        np.stack([projected(row / scale) for row in scores]) for scale in np.linspace(1e-4, 1, 1000)
    ]
    best = min(candidates, key=energy)
    projection = make_projection(jnp.float32(signals), jnp.asarray(has_signal), M)
    centres = np.stack([place(projection, jnp.float32(row)) for row in signals])
    np.testing.assert_allclose(centres, best, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        riesz_energy(centres, jnp.asarray(has_signal)), energy(best), rtol=1e-5
    )


def test_clients_that_trained_get_regions_after_the_first_rounds():
    algorithm, data = linear.make_classifier(
        "floco", [X] * 3, [Y] * 3, endpoints=M, place_after=2, radius=0.25, first_round=5
    )
    state = algorithm.init(linear.KEY)
    old = state.server.variables
    uploads = [deep(kernels(old)[0] + k, kernels(old)[1] - HEADS * (k + 1)) for k in range(3)]
    payload = algorithm.send(state._replace(clients=()), linear.context(data))

    def after(state, t, arrived):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *uploads)
        present = jnp.asarray(arrived)
        ids = jnp.where(present, jnp.arange(3), 3)
        cohort = linear.tiny_cohort([4] * 3, ids, present, trees.repeat(payload, 3), stacked, t)
        server, rows = algorithm.receive(state._replace(clients=()), cohort)
        return state._replace(server=server, rows=rows)

    def regions(state):
        sent = [algorithm.send(state, ClientContext(i, None, 8, linear.KEY)) for i in range(3)]
        return np.stack([s["centre"] for s in sent]), [float(s["radius"]) for s in sent]

    first = after(state, 5, [True, False, False])
    np.testing.assert_allclose(first.rows.signal[0], HEADS.ravel(), rtol=1e-6, atol=1e-7)
    assert kernels(first.server.variables)[0] == pytest.approx(kernels(uploads[0])[0])
    centres, radii = regions(first)
    np.testing.assert_allclose(centres, 1 / M, rtol=3e-7)
    assert radii == [2.0, 2.0, 2.0]
    second = after(first, 6, [False, True, False])
    centres, radii = regions(second)
    np.testing.assert_allclose(centres.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(centres[2], 1 / M, rtol=3e-7)
    assert np.abs(centres[0] - centres[1]).sum() > 0.1
    assert radii == [0.25, 0.25, 2.0]
    # Places are final; the first round of client 2 places it as well.
    third = after(second, 7, [True, True, True])
    chex.assert_trees_all_equal(third.server.projection, second.server.projection)
    last_centres, radii = regions(third)
    np.testing.assert_array_equal(last_centres[:2], centres[:2])
    np.testing.assert_allclose(third.rows.signal[2], 3 * HEADS.ravel(), rtol=1e-6, atol=1e-7)
    assert radii == [0.25, 0.25, 0.25]
    np.testing.assert_array_equal(algorithm.observe(third)["centre"], last_centres)
    served = algorithm.personalize(third, (), ClientContext(1, None, 8, linear.KEY))
    mixed = np.tensordot(last_centres[1], kernels(third.server.variables)[1], 1)
    np.testing.assert_allclose(kernels(served)[1], mixed, rtol=1e-6, atol=1e-7)


def test_traffic_is_the_body_all_endpoints_and_the_region_down():
    algorithm, data = linear.make_classifier("floco", endpoints=M)
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    result = train_client(algorithm, payload, (), data)
    traffic = algorithm.traffic(payload, result.upload)
    assert traffic.up == {"body": 4 * 4, "head": 4 * 6 * M}
    assert traffic.down == {**traffic.up, "centre": 4 * M, "radius": 4}


def test_phases_continue_the_endpoints_or_start_from_a_model():
    algorithm, _ = linear.make_classifier("floco", endpoints=M)
    state = algorithm.init(linear.KEY)
    heads = kernels(state.server.variables)[1]
    assert not (heads[0] == heads[1]).any()
    placed = state._replace(server=state.server._replace(is_placed=jnp.ones((), bool)))
    chex.assert_trees_all_equal(algorithm.init(jax.random.key(9), placed), state)
    started = algorithm.init(linear.KEY, State(deep(A, HEAD), (), ()))
    chex.assert_trees_all_equal(started.server.variables, deep(A, np.stack([HEAD] * M)))
    two_endpoints, _ = linear.make_classifier("floco", endpoints=2)
    with pytest.raises(UsageError, match="a phase can only start"):
        two_endpoints.init(linear.KEY, state)
