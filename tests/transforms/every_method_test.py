"""Rules of the contract for every method among attackers, and with a robust server."""

import numpy as np
import pytest

from fedjax_pfl import transforms
from tests import cases, rules, tiny
from tests.transforms.server_optimizer_test import SUPPORTED

DATA, FEDERATION = tiny.federated()
IS_ATTACKER = np.isin(np.arange(tiny.CLIENTS), [1, 4])


@pytest.mark.slow("rules of the contract around every method")
@pytest.mark.parametrize("name", cases.NAMES)
def test_methods_keep_the_rules_among_attackers(name: str):
    rules.check_transforms(
        name,
        transforms.attack_uploads(IS_ATTACKER, "sign_flip"),
        transforms.attack_uploads(IS_ATTACKER, "min_max"),
    )


@pytest.mark.slow("rules of the contract around every method that admits a robust server")
@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_methods_keep_the_rules_with_a_robust_server(name: str):
    rules.check_transforms(name, transforms.robust(FEDERATION, DATA, "trimmed_mean"))
