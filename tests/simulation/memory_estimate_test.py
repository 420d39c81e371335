"""Memory found without compiling, against sums by hand and against what XLA allocates."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import build, phase
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import execution_plan, memory_estimate, rounds
from fedjax_pfl.simulation.map_clients import map_clients
from tests import programs

KIB = jax.ShapeDtypeStruct((256,), jnp.float32)


def wide(x):
    return jnp.broadcast_to(x, (256, 256))


@pytest.mark.parametrize(
    ("f", "arguments", "kibibytes"),
    [
        (lambda x: x + 1, [KIB], 2),  # what comes in stays until its last use, then what comes out
        (lambda x: x * 2 + x * 3, [KIB], 3),  # x and one product, then x with both
        (lambda x: (x * 2) * 3, [KIB], 2),
        (lambda x, y: x + y, [KIB, KIB], 3),
        (lambda x: wide(x).sum(), [KIB], 257),
        # In place: the sum replaces what nobody needs any more, and not what somebody does.
        (lambda x: (x * 2).at[3].set(1.0), [KIB], 2),
        (lambda x: (x.at[3].set(1.0), x), [KIB], 2),
        # Loops keep what they carry once, and what goes on inside.
        (lambda x: jax.lax.fori_loop(0, 9, lambda i, x: wide(x).sum(0), x), [KIB], 257),
        # A scan's results are stacked: eight of them, what is carried and what that becomes.
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, 8)[1], [KIB], 10),
    ],
)
def test_by_hand(f, arguments, kibibytes):
    assert abs(memory_estimate.peak_bytes(f, *arguments) / 1024 - kibibytes) < 0.1


def test_donated_arguments_are_replaced():
    def f(x):
        return x * 2 + 1

    assert memory_estimate.peak_bytes(jax.jit(f), KIB) == 3 * 1024
    assert memory_estimate.peak_bytes(jax.jit(f, donate_argnums=0), KIB) == 2 * 1024


@pytest.mark.slow("programs at full size")
def test_a_run_needs_about_as_much_as_xla_allocates():
    """More clients at once need more, nearly in proportion."""
    found = {}
    for chunk in (2, 5, 10):
        config = configuration.complete(
            {
                "algorithm": "fedavg",
                "model": "small",
                "clients": 10,
                "devices": 1,
                "rounds": 2,
                "eval_every": 2,
                "chunk": chunk,
                "conv": "patches",
            }
        )
        built = build.build(config)
        rounds = built.phases[0].rounds
        key, state = jax.random.key(0), jax.eval_shape(rounds.init, jax.random.key(0))
        arguments = (key, state, built.data, jnp.int32(0), jnp.int32(1))
        found[chunk] = memory_estimate.peak_bytes(rounds.run, *arguments)
        if chunk == 10:
            real = rounds.run.lower(*arguments).compile().memory_analysis()
    used = real.argument_size_in_bytes + real.temp_size_in_bytes + real.output_size_in_bytes
    used -= real.alias_size_in_bytes
    assert abs((found[10] - found[5]) / 5 / ((found[5] - found[2]) / 3) - 1) < 0.2
    assert 0.7 < found[10] / used < 1.5


BASE = {"algorithm": "fedavg", "model": "small", "clients": 10, "devices": 1, "rounds": 2}


@pytest.mark.slow("programs at full size")
def test_a_budget_chooses_how_many_clients_at_a_time(monkeypatch):
    """As on an accelerator, where all are trained together unless memory is short."""
    monkeypatch.setattr(execution_plan, "default_chunk", lambda count: count)
    tried = []

    def make(*arguments, chunk, **settings):
        tried.append(chunk)
        return rounds.round_functions(*arguments, chunk=chunk, **settings)

    monkeypatch.setattr(phase, "round_functions", make)
    build.build(configuration.complete({**BASE, "memory_gb": 1.0}))
    assert tried == [10]
    tried.clear()
    build.build(configuration.complete({**BASE, "memory_gb": 0.005}))
    assert tried == [10, 5, 2]
    with pytest.raises(
        UsageError, match=r"1 of 10 clients .* needs about 0\.00\d+ GB, and memory_gb"
    ):
        build.build(configuration.complete({**BASE, "memory_gb": 0.0005}))
    with pytest.raises(UsageError, match="use fewer clients, a smaller chunk, model or batch_size"):
        build.build(configuration.complete({**BASE, "memory_gb": 0.005, "chunk": 10}))


@pytest.mark.slow("programs at full size")
def test_a_thousand_clients_of_pfedla_fit_into_eight_gigabytes():
    config = {
        "algorithm": "pfedla",
        "model": "lenet",
        "dataset": "synthetic",
        "clients": 1000,
        "clients_per_round": 100,
        "partition": "iid",
        "memory_gb": 8.0,
        "devices": 1,
        "synthetic": {"shape": (32, 32, 3), "examples": 10_000, "classes": 10},
    }
    build.build(configuration.complete(config))
    with pytest.raises(UsageError, match=r"needs about [67]\.\d+ GB"):
        build.build(configuration.complete({**config, "memory_gb": 3.0}))


def test_what_all_gathers_put_together_is_what_is_compiled(mesh):
    """Five items, so padded to eight, in a loop; one of three results is used by nobody."""

    def work(shared, item):
        return shared * item, (item.sum() > 0, jnp.ones((3, 2), jnp.int32))

    def looped(shared, items):
        def step(_, x):
            products, (_, ones) = map_clients(work, x, items, jnp.ones(5, bool), 1, mesh)
            return x + products[0] * ones.sum().astype(jnp.float32)

        return jax.lax.fori_loop(0, 3, step, shared)

    arguments = jnp.zeros(3), jnp.ones((5, 3))
    assert memory_estimate.all_gather_bytes(looped, *arguments) == 8 * (4 * 3 + 4 * 3 * 2)
    text = jax.jit(looped).lower(*arguments).compile().as_text()
    assert programs.all_gathered(text) == memory_estimate.all_gather_bytes(looped, *arguments)
