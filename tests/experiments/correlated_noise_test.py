"""Tests of the comparison of independent and correlated noise."""

from types import SimpleNamespace

import numpy as np
import pytest
from absl import flags

from experiments import attackers, correlated_noise
from tests.commands import message
from tests.transforms.privacy.correlated_noise_test import matrix


@pytest.mark.parametrize("bands", [1, 3, 9])
def test_errors_are_those_of_the_dense_matrices(bands: int):
    last, mean = correlated_noise.squared_errors(bands, 7)
    variances = np.sum((np.tri(7) @ np.linalg.inv(matrix(bands, 7))) ** 2, 1)
    assert last == pytest.approx(variances[-1])
    assert mean == pytest.approx(variances.mean())


def test_poisson_noise_without_sampling_is_that_of_the_gaussian_mechanism():
    """A replaced client with all of ε = 8: twice ε = 4 of a removed one."""
    noise = correlated_noise.poisson_noise(1.0, 4, 8.0, 1e-5)
    alone = correlated_noise.poisson_noise(1.0, 1, 8.0, 1e-5)
    assert noise == pytest.approx(2 * alone, rel=0.01)
    assert correlated_noise.poisson_noise(0.1, 4, 8.0, 1e-5) < 0.9 * noise


@pytest.mark.parametrize("script", [attackers, correlated_noise])
def test_an_argument_that_is_no_flag_is_refused(script):
    """Without --dataset=, the name of a dataset would be ignored."""
    assert message(script.main, ["script", "mnist"]) == "'mnist' is no flag; see --help"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"epsilons": ["4", "foo"]}, "--epsilons=4,foo is no list of numbers above 0, such as 4,8"),
        ({"epsilons": ["-1"]}, "--epsilons=-1 is no list of numbers above 0, such as 4,8"),
        ({"epsilons": ["inf"]}, "--epsilons=inf is no list of numbers above 0, such as 4,8"),
        ({"epsilons": []}, "--epsilons= is no list of numbers above 0, such as 4,8"),
        ({"delta": 2.0}, "--delta=2: with 20 clients it must be below 0.05"),
        ({"clients_per_round": 21}, "--clients_per_round is above --clients; lower it"),
    ],
)
def test_impossible_values_are_refused(changes, line, monkeypatch):
    values = {"clients": 20, "clients_per_round": 5, "rounds": 3, "epsilons": ["4"], "delta": 1e-5}
    monkeypatch.setattr(flags, "FLAGS", SimpleNamespace(**values | changes))
    assert message(correlated_noise.main, ["script"]) == line
