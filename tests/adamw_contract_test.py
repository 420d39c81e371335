"""The contract with AdamW at the clients, who keep its state, and a schedule over their steps."""

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

# What differs between methods is where they keep the optimiser's state, and how many there are.
pytestmark = pytest.mark.slow("the programs of seven methods; the optimiser has tests of its own")

# An eps as small as the default would show the rounding of gradients that are next to nothing.
VALUES = {
    **{name: row.default_value for name, row in SETTINGS.items()},
    "weight_decay": 0.01,
    "eps": 1e-2,
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


def make(name: str, federation: Federation, own: Mapping[str, Any], rate: Any = 0.01) -> Algorithm:
    training = local_training.make_training(
        optimizers.OPTIMIZERS["adamw"](VALUES.__getitem__),
        learning_rate=rate,
        step_schedule=optimizers.schedule("linear", 0.5, 0.0),
        clip_norm=5.0,
        batch_size=4,
        epochs=2,
        keep_optimizer=True,
    )
    settings = {**cases.CASES[name].settings, **own}
    return cases.FACTORIES[name](tiny.Net(), training, federation, **settings)


@cache
def subject(name: str) -> rules.Subject:
    def made(federation: Federation, own: Mapping[str, Any] = cases.NOTHING) -> Algorithm:
        return make(name, federation, own)

    return rules.make_subject(name, cases.CASES[name], made)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", cases.STRUCTURES)
def test_rule(name: str, rule: Any):
    rule(subject(name))


def test_a_rate_that_is_swept():
    """The second of two points is the run with its rate; the first is another."""
    one, points = (
        subject("fedavg"),
        sweep.Points(jnp.stack([contract.make_key()] * 2), jnp.arange(2)),
    )

    def plain(now: Mapping[str, Any]) -> Any:
        made = make("fedavg", rules.TINY.federation, {}, now["rate"])
        return round_functions(made, rules.TINY.federation, **contract.OPTIONS)

    rounds = sweep.make_rounds(plain, {"rate": (0.005, 0.01)}, None, width=1)
    states, _ = rounds.run(points, rounds.init(points), rules.TINY.data, jnp.int32(0), jnp.int32(1))
    wanted, _ = one.run(1)
    chex.assert_trees_all_close(trees.row(states, 1), wanted, **contract.TOLERANCES)
    first, second = (jax.tree.leaves(trees.row(states, i).server) for i in (0, 1))
    assert all((a != b).any() for a, b in zip(first, second, strict=True))
