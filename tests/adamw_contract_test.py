"""Rules of the contract with AdamW and a schedule over local steps; clients keep its state."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from fedjax_pfl.core import local_training, optimizers, trees
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.settings.general import SETTINGS
from fedjax_pfl.simulation import sweep
from fedjax_pfl.simulation.rounds import round_functions
from fedjax_pfl.testing import rules as contract
from tests import cases, rules, tiny

pytestmark = pytest.mark.slow("the programs of seven methods; the optimiser has its tests")

VALUES = {
    **{name: row.default_value for name, row in SETTINGS.items()},
    "weight_decay": 0.01,
    "eps": 1e-2,  # the default would show the rounding of very small gradients
}
RULES = (
    contract.shapes_are_right,
    contract.equals_a_plain_loop,
    contract.padding_is_invisible,
    contract.rounds_are_compiled_once,
    contract.a_checkpoint_holds_the_whole_state,
    contract.absent_clients_are_untouched,
    contract.a_round_without_uploads_changes_nothing,
)


def make(
    name: str,
    federation: Federation,
    settings: Mapping[str, Any] = cases.NOTHING,
    learning_rate: Any = 0.03,
) -> Algorithm:
    training = local_training.make_training(
        optimizers.OPTIMIZERS["adamw"](VALUES.__getitem__),
        learning_rate=learning_rate,
        step_schedule=optimizers.schedule("linear", 0.5, 0.0),
        clip_norm=5.0,
        batch_size=4,
        epochs=2,
        keep_optimizer=True,
    )
    settings = {**cases.CASES[name].settings, **settings}
    return cases.FACTORIES[name](tiny.Net(), training, federation, **settings)


@cache
def make_subject(name: str) -> rules.Subject:
    return rules.make_subject(name, cases.CASES[name], lambda *args: make(name, *args))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", cases.STRUCTURES)
def test_rule(name: str, rule: Any):
    rule(make_subject(name))


def test_a_point_of_a_sweep_of_learning_rates_equals_a_run():
    points = sweep.Points(jnp.stack([contract.make_key()] * 2), jnp.arange(2))

    def functions(settings: Mapping[str, Any]) -> Any:
        method = make("fedavg", rules.TINY.federation, {}, settings["rate"])
        return round_functions(method, rules.TINY.federation, **contract.OPTIONS)

    rounds = sweep.make_rounds(functions, {"rate": (0.01, 0.03)}, None, width=1)
    states, _ = rounds.run(points, rounds.init(points), rules.TINY.data, jnp.int32(0), jnp.int32(1))
    expected, _ = make_subject("fedavg").run(1)
    chex.assert_trees_all_close(trees.row(states, 1), expected, **contract.TOLERANCES)
    first, second = (jax.tree.leaves(trees.row(states, i).server) for i in (0, 1))
    assert all((a != b).any() for a, b in zip(first, second, strict=True))
