"""The rules of the contract for networks of your own, and for tokens, in methods that differ.

The networks are as Flax has them: they know of no mask, and nobody has said what their layers are.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.networks import LSTM, Transformer
from fedjax_pfl.networks.user_defined import LinenNetwork
from fedjax_pfl.networks.user_defined_nnx import NnxNetwork
from fedjax_pfl.testing import rules as contract
from tests import cases, rules, tiny


class RoundFunctions(nn.Module):
    """BatchNorm and dropout as they come; E[x²] − E[x]² of few examples would cancel."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.BatchNorm(not train, momentum=0.9, use_fast_variance=False)(
            nn.Dense(tiny.HIDDEN, use_bias=False)(x)
        )
        return nn.Dense(tiny.CLASSES)(nn.Dropout(0.2, deterministic=not train)(nn.relu(x)))


class Modern(nnx.Module):
    """Likewise."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(tiny.FEATURES, tiny.HIDDEN, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(tiny.HIDDEN, momentum=0.9, use_fast_variance=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(tiny.HIDDEN, tiny.CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def modern(rngs: nnx.Rngs) -> Modern:
    return Modern(rngs=rngs)


NETWORKS = {
    "linen": LinenNetwork("Plain", {}, RoundFunctions(), (tiny.FEATURES,)),
    "nnx": NnxNetwork("Modern", {}, modern, (tiny.FEATURES,)),
    "lstm": LSTM(tiny.TOKENS, 3, (4,)),
    "transformer": Transformer(tiny.TOKENS, 4, 1, 2, 0.1),
}
RULES = (
    contract.shapes_are_right,
    contract.equals_a_plain_loop,
    contract.padding_is_invisible,
    contract.rounds_are_compiled_once,
    contract.a_checkpoint_holds_the_whole_state,
    contract.absent_clients_are_untouched,
)
LONG = pytest.mark.slow("each of them compiles programs of its own")
SUBJECTS = [
    ("nnx", "fedavg"),
    *(
        pytest.param(network, name, marks=LONG)
        for network, name in (
            ("linen", "fedavg"),
            ("linen", "fedper"),
            ("linen", "pfedla"),
            ("linen", "pfedhn"),
            ("linen", "factorized_fl"),
            ("linen", "fedbn"),
            ("linen", "fedproto"),
            ("linen", "fedpac"),
            ("linen", "fedas"),
            ("nnx", "pfedhn"),
            ("nnx", "fedper"),
            ("nnx", "pfedla"),
            ("nnx", "factorized_fl"),
            ("lstm", "fedavg"),
            ("lstm", "fedper"),
            ("lstm", "pfedla"),
            ("lstm", "factorized_fl"),
            ("transformer", "fedavg"),
            ("transformer", "pfedhn"),
        )
    ),
]
# At the case's rate of .1 the loss of a transformer that is generated swings; at this one it
# falls, slowly: from 48.2 to 47.4 in 36 rounds, and to 43.0 in 48.
OWN = {("transformer", "pfedhn"): {"rate": 0.003}}
LEARNED = {("transformer", "pfedhn"): 48}  # in so many rounds, not in six


@cache
def subject(network: str, name: str) -> rules.Subject:
    tokens = network in ("lstm", "transformer")

    def make(federation: Federation, own: Mapping[str, Any] = cases.NOTHING) -> Algorithm:
        case = cases.CASES[name]
        training = cases.training(**{**(case.training or {}), "learning_rate": 0.03})
        settings = {**case.settings, **OWN.get((network, name), {}), **own}
        return cases.FACTORIES[name](NETWORKS[network], training, federation, **settings)

    place = contract.make_world(tiny.tokens) if tokens else rules.TINY
    return rules.make_subject(name, cases.CASES[name], make, place)


@pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
@pytest.mark.parametrize(("network", "name"), SUBJECTS)
def test_rule(network: str, name: str, rule: str):
    rules.BY_NAME[rule](subject(network, name))


@pytest.mark.parametrize(("network", "name"), SUBJECTS)
def test_something_is_learned(network: str, name: str):
    """Some rounds move the loss down: the gradient goes through all of it."""
    one = subject(network, name)
    rounds = LEARNED.get((network, name), contract.ROUNDS)
    end = jnp.int32(rounds)
    first, last = (
        jax.device_get(
            one.rounds.evaluate(contract.make_key(), one.rounds.place(state), one.world.data, end)
        )
        for state in (one.first_state, one.run(rounds)[0])
    )
    before, after = (float(scores.before.loss.sum()) for scores in (first, last))
    assert after < before
