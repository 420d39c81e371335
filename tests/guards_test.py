"""What makes a round fast, seen in its program, so that nothing need be timed."""

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


def lowered(**changes):
    """A phase's rounds, and what they are called with."""
    built = build.build(configuration.complete({**BASE, **changes}))
    rounds = built.phases[0].rounds
    key, data = rounds.place((jax.random.key(0), built.data))
    zero, two = (rounds.place(jnp.int32(number)) for number in (0, 2))
    return rounds, (key, rounds.init(key), data, zero, two)


@pytest.mark.slow("a program for each lowering")
@pytest.mark.parametrize("conv", ["patches", "rows", "blocks", "winograd", "xla"])
def test_a_whole_round_of_products_where_the_plan_says_so(conv):
    rounds, arguments = lowered(conv=conv)
    for program in (
        rounds.run.lower(*arguments).as_text(),
        rounds.evaluate.lower(*arguments[:4]).as_text(),
    ):
        assert ("stablehlo.convolution" in program) == (conv == "xla")
        assert "stablehlo.dot_general" in program


@pytest.mark.slow("a run")
def test_nothing_goes_to_the_host_within_a_call():
    """No callbacks, and two calls of several rounds each with transfers forbidden."""
    rounds, (key, state, data, zero, two) = lowered()
    program = rounds.run.lower(key, state, data, zero, two).as_text()
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in program
    run = rounds.run.lower(key, state, data, zero, two).compile()
    with jax.transfer_guard("disallow"):
        state, _ = run(key, state, data, zero, two)
        state, _ = run(key, state, data, two, two)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="host-to-device"):
        run(key, state, data, np.int32(4), two)  # the guard does see what comes from the host
