"""Tests of the comparison of independent and correlated noise."""

import numpy as np
import pytest

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
