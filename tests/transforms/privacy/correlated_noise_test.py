"""Tests of correlated noise against dense matrices, and of its sensitivity by brute force."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.transforms.privacy import clip_and_noise, correlated_noise
from fedjax_pfl.transforms.privacy.client_level import CorrelatedServer, client_privacy
from tests import rules, tiny
from tests.transforms.privacy import client_level_test

KEY = jax.random.key(5)


def matrix(bands: int, rounds: int) -> np.ndarray:
    """Returns C, [rounds, rounds]."""
    c = [math.comb(2 * j, j) / 4**j for j in range(bands)]
    return np.sum([np.diag(np.full(rounds - j, c[j]), -j) for j in range(min(bands, rounds))], 0)


def test_coefficients_are_those_of_the_square_root():
    np.testing.assert_allclose(correlated_noise.coefficients(9), matrix(9, 9)[:, 0], rtol=1e-12)
    np.testing.assert_allclose(matrix(9, 9) @ matrix(9, 9), np.tri(9), rtol=1e-12)
    assert correlated_noise.coefficients(1).tolist() == [1.0]


@pytest.mark.parametrize("bands", [2, 4])
def test_the_recursion_solves_the_dense_system(bands: int):
    """Rounds 2, 3 and 6 have no call."""
    model = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(5)}
    rounds, called_rounds = 9, (0, 1, 4, 5, 7, 8)
    advance = jax.jit(lambda history, t: correlated_noise.advance(history, t, KEY, bands))
    history, noise = correlated_noise.empty_history(model, bands), {}
    for t in called_rounds:
        noise[t], history = advance(history, t)
    independent = [
        clip_and_noise.add_noise(model, 1.0, jax.random.fold_in(KEY, t)) for t in range(rounds)
    ]
    for name in model:
        z = np.stack([tree[name].ravel() for tree in independent])
        expected = np.linalg.solve(matrix(bands, rounds), z)
        for t in called_rounds:
            np.testing.assert_allclose(noise[t][name].ravel(), expected[t], atol=1e-5)
    # Noise of an earlier round is new, not that of a finished one.
    repeated, _ = advance(history, 8)
    assert not np.isclose(repeated["b"], noise[8]["b"]).any()


def test_the_noise_of_models_has_the_covariance_of_the_formula():
    """The model after round t is a prefix sum of the noise, z C / K times the standard one."""
    bands, rounds, size = 3, 8, client_level_test.SIZE
    plain = client_level_test.vector(size)
    algorithm = client_level_test.private(plain, clip_norm=0.5, noise_multiplier=3.0, bands=bands)
    no_change = {"params": {"w": np.zeros((tiny.CLIENTS, size), np.float32)}}
    all_clients = np.ones(tiny.CLIENTS, bool)
    server, models = algorithm.init(KEY).server, []

    @jax.jit
    def receive(server: CorrelatedServer, t: jax.Array) -> CorrelatedServer:
        key, state = jax.random.fold_in(KEY, t), State(server, (), ())
        return client_level_test.receive(algorithm, state, no_change, all_clients, key, t)

    for t in range(rounds):
        server = receive(server, t)
        models.append(server.method["params"]["w"])
    assert server.history.noise["params"]["w"].shape == (bands - 1, size)
    scaled = np.stack(models) / (3.0 * 0.5 / tiny.CLIENTS)
    factor = np.tri(rounds) @ np.linalg.inv(matrix(bands, rounds))
    expected = factor @ factor.T
    # The standard error of a covariance is at most √(2 / size) = 0.01 of the variances.
    largest = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_array_less(np.abs(scaled @ scaled.T / size - expected) / largest, 0.06)


@pytest.mark.parametrize(("bands", "rounds"), [(1, 5), (2, 6), (3, 8)])
def test_no_pattern_of_participations_exceeds_the_sensitivity(bands: int, rounds: int):
    """Tries all sets of rounds at least `bands` apart, and all signs of the changes."""
    dense, squared_norm = matrix(bands, rounds), np.sum(correlated_noise.coefficients(bands) ** 2)
    largest = np.zeros(rounds + 1)
    for changes in itertools.product((-1, 0, 1), repeat=rounds):
        participations = np.flatnonzero(changes)
        if (np.diff(participations) >= bands).all():
            squared = np.sum((dense @ changes) ** 2)
            largest[len(participations)] = max(largest[len(participations)], squared)
    k = np.arange(rounds + 1)
    assert (largest <= k * squared_norm + 1e-9).all()
    possible = k <= -(-rounds // bands)
    assert (largest[~possible] == 0).all()
    for sampled, population in [(1, bands), (2, 2 * bands + 1), (3, 3 * bands + 2), (2, 11)]:
        exact = 0.0
        for position in range(population):
            places = np.arange(position, rounds * sampled, population)
            changes = np.bincount(places // sampled, minlength=rounds)
            exact = max(exact, np.sum((dense @ changes) ** 2))
        stated = correlated_noise.squared_sensitivity(bands, sampled, population, rounds)
        assert stated == pytest.approx(exact)
        assert stated <= largest.max() + 1e-9


@pytest.mark.slow("rules of the contract around two methods")
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_methods_keep_the_rules(name: str):
    data, federation = tiny.federated()
    private = client_privacy(
        federation,
        data,
        clients_per_round=tiny.CLIENTS,
        clip_norm=0.5,
        noise_multiplier=0.1,
        bands=3,
    )
    rules.check_transforms(name, private)
