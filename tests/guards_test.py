"""Properties of compiled rounds that make them fast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.runs import build
from fedjax_pfl.settings import configuration

BASE = {
    "algorithm": "pfedla",
    "model": "small",
    "clients": 4,
    "rounds": 2,
    "eval_every": 2,
    "chunk": 2,
    "devices": 1,
    "evaluate_after": False,
}


def make_rounds(**changes):
    """Returns the rounds of a phase and their arguments."""
    experiment = build.build(configuration.complete({**BASE, **changes}))
    rounds = experiment.phases[0].rounds
    key, data = rounds.place((jax.random.key(0), experiment.data))
    zero, two = (rounds.place(jnp.int32(number)) for number in (0, 2))
    return rounds, (key, rounds.init(key), data, zero, two)


@pytest.mark.slow("a program for each lowering")
@pytest.mark.parametrize("conv", ["patches", "rows", "blocks", "winograd", "xla"])
def test_rounds_have_convolutions_only_with_the_lowering_xla(conv):
    rounds, arguments = make_rounds(conv=conv)
    for program in (
        rounds.run.lower(*arguments).as_text(),
        rounds.evaluate.lower(*arguments[:4]).as_text(),
    ):
        assert ("stablehlo.convolution" in program) == (conv == "xla")
        assert "stablehlo.dot_general" in program


@pytest.mark.slow("a run")
def test_a_call_of_several_rounds_transfers_nothing_from_or_to_the_host():
    rounds, (key, state, data, zero, two) = make_rounds()
    program = rounds.run.lower(key, state, data, zero, two).as_text()
    transfers = ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv")
    assert not [name for name in transfers if name in program]
    run = rounds.run.lower(key, state, data, zero, two).compile()
    with jax.transfer_guard("disallow"):
        state, _ = run(key, state, data, zero, two)
        state, _ = run(key, state, data, two, two)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="host-to-device"):
        run(key, state, data, np.int32(4), two)  # shows that the guard works
