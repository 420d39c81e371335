"""Tests of ε against formulas worked out by hand and against published numbers."""

import dp_accounting
import numpy as np
import pytest
from scipy.stats import norm

from fedjax_pfl.transforms.privacy import accounting
from fedjax_pfl.transforms.privacy.accounting import Sampling, epsilon, noise_multiplier

ALL = Sampling(sampled=10, population=10)
DELTA = 1e-5


@pytest.mark.parametrize(("noise", "rounds"), [(1.1, 1), (8.0, 25), (40.0, 100)])
def test_epsilon_without_sampling_solves_the_equation_of_the_gaussian_mechanism(noise, rounds):
    """Balle and Wang, Improving the Gaussian Mechanism, 2018, Theorem 8, for sensitivity 2."""
    value = epsilon(ALL, noise, DELTA, rounds)
    mu = 2 * np.sqrt(rounds) / noise
    delta = norm.cdf(mu / 2 - value / mu) - np.exp(value) * norm.cdf(-mu / 2 - value / mu)
    assert delta == pytest.approx(DELTA, rel=1e-4)
    assert epsilon(ALL._replace(uses=rounds), noise, DELTA, 1) == value


def test_epsilon_with_sampling_is_the_bound_of_the_paper(monkeypatch: pytest.MonkeyPatch):
    """Wang et al. 2019, Theorem 27, at order 2, and the conversion of Canonne et al. 2020."""
    monkeypatch.setattr(accounting, "_ORDERS", (2,))
    noise, rounds, q, rho = 6.0, 200, 0.05, (2 / 6.0) ** 2  # rho: Rényi divergence of order 2
    divergence = np.log(1 + q**2 * min(4 * (np.exp(rho) - 1), 2 * np.exp(rho)))
    expected = rounds * divergence + np.log(1 / 2) - np.log(2 * 0.01)
    value = epsilon.__wrapped__(Sampling(5, 100), noise, 0.01, rounds)
    assert value == pytest.approx(expected, rel=1e-9)


def test_the_package_reproduces_a_published_epsilon():
    """Abadi et al., Deep Learning with Differential Privacy, 2016, Section 3.2: ε = 1.26."""
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(4.0))
    values = []
    for order in range(2, 64):
        accountant = dp_accounting.rdp.RdpAccountant([order])
        new = accountant.compose(event, 10_000).get_epsilon(DELTA)
        # The paper's conversion is log(1/δ) / (order − 1) instead.
        values.append(new - np.log1p(-1 / order) + np.log(order) / (order - 1))
    assert min(values) == pytest.approx(1.26, abs=0.005)


def test_sampling_helps_and_rounds_cost():
    sampled = Sampling(sampled=10, population=1000)
    values = [epsilon(sampled, 2.0, DELTA, rounds) for rounds in (0, 1, 10, 100)]
    assert values[0] == 0
    assert values == sorted(values)
    assert values[-1] < epsilon(ALL, 2.0, DELTA, 100)
    assert epsilon(sampled, 0.0, DELTA, 1) == np.inf
    # With most clients sampled, the bound with amplification is the larger one.
    most = Sampling(sampled=9, population=10)
    assert epsilon(most, 20.0, DELTA, 5) == epsilon(ALL, 20.0, DELTA, 5)


def test_clients_in_turn_count_their_participations():
    """With 7 of 22 clients, 8 rounds have 56 places, so a client takes part up to 3 times."""
    in_turn = Sampling(sampled=7, population=22, is_cyclic=True)
    squared_norm = 1 + 1 / 4 + 9 / 64  # 1, 1/2 and 3/8
    for bands, factor in [(1, 3.0), (3, 2 * squared_norm + 5 / 4)]:  # the last in rounds 6 and 7
        multiplier = 8.0 / 2 / np.sqrt(factor)
        value = epsilon(in_turn._replace(bands=bands), 8.0, DELTA, 8)
        assert value == pytest.approx(dp_accounting.get_epsilon_gaussian(multiplier, DELTA))


@pytest.mark.slow("searches for noise")
@pytest.mark.parametrize(
    "sampling", [ALL, Sampling(10, 1000), Sampling(3, 10, is_cyclic=True, bands=3)]
)
def test_a_target_gives_the_smallest_noise(sampling):
    noise = noise_multiplier(sampling, 4.0, DELTA, 50)
    assert epsilon(sampling, noise, DELTA, 50) <= 4.0
    assert epsilon(sampling, noise * 0.999, DELTA, 50) > 4.0
