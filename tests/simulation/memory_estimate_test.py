"""Tests of estimated memory against sums worked out manually and against XLA's allocation."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import build, phase_inputs
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import execution_plan, memory_estimate, rounds
from fedjax_pfl.simulation.map_clients import map_clients
from tests import programs

KIB = jax.ShapeDtypeStruct((256,), jnp.float32)
BASE = {"algorithm": "fedavg", "model": "small", "clients": 10, "devices": 1, "rounds": 2}


def wide(x):
    return jnp.broadcast_to(x, (256, 256))


@pytest.mark.parametrize(
    ("f", "arguments", "kibibytes"),
    [
        (lambda x: x + 1, [KIB], 2),  # input and output
        (lambda x: x * 2 + x * 3, [KIB], 3),  # x and both products
        (lambda x: (x * 2) * 3, [KIB], 2),
        (lambda x: x * jax.lax.cond(x[0] < 1, lambda: 0.1, lambda: 0.2), [KIB], 2),
        (lambda x, y: x + y, [KIB, KIB], 3),
        (lambda x: wide(x).sum(), [KIB], 257),
        # An update is in place only if the old value is not used again.
        (lambda x: (x * 2).at[3].set(1.0), [KIB], 2),
        (lambda x: (x.at[3].set(1.0), x), [KIB], 2),
        # Loops hold their carry once, and temporaries of their body.
        (lambda x: jax.lax.fori_loop(0, 9, lambda i, x: wide(x).sum(0), x), [KIB], 257),
        # A scan stacks eight results and holds the old and new carry.
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, 8)[1], [KIB], 10),
        # Stacked results that nothing uses are not computed.
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, 8)[0], [KIB], 2),
        (lambda x, y: x + 1, [KIB, KIB], 3),  # an unused argument
    ],
)
def test_small_functions(f, arguments, kibibytes):
    assert abs(memory_estimate.peak_bytes(f, *arguments) / 1024 - kibibytes) < 0.1


def test_donated_arguments_are_replaced():
    def f(x):
        return x * 2 + 1

    assert memory_estimate.peak_bytes(jax.jit(f), KIB) == 3 * 1024
    assert memory_estimate.peak_bytes(jax.jit(f, donate_argnums=0), KIB) == 2 * 1024


def built(**changes):
    return build.build(configuration.complete({**BASE, **changes}))


@pytest.mark.slow("programs at full size")
def test_the_estimate_is_close_to_the_allocation_of_xla():
    """Checks that memory grows nearly in proportion to the clients of a chunk."""
    estimates = {}
    for chunk in (2, 5, 10):
        experiment = built(eval_every=2, chunk=chunk, conv="patches")
        rounds = experiment.phases[0].rounds
        key, state = jax.random.key(0), jax.eval_shape(rounds.init, jax.random.key(0))
        arguments = (key, state, experiment.data, jnp.int32(0), jnp.int32(1))
        estimates[chunk] = memory_estimate.peak_bytes(rounds.run, *arguments)
    analysis = rounds.run.lower(*arguments).compile().memory_analysis()
    used = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    used += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    ratio = (estimates[10] - estimates[5]) / 5 / ((estimates[5] - estimates[2]) / 3)
    assert abs(ratio - 1) < 0.2
    assert 0.7 < estimates[10] / used < 1.5


@pytest.mark.slow("programs at full size")
def test_a_memory_budget_chooses_the_chunk(monkeypatch):
    """Imitates an accelerator, which trains all clients at the same time if memory suffices."""
    monkeypatch.setattr(execution_plan, "default_chunk", lambda count: count)
    chunks = []

    def make(*arguments, chunk, **settings):
        chunks.append(chunk)
        return rounds.round_functions(*arguments, chunk=chunk, **settings)

    monkeypatch.setattr(phase_inputs, "round_functions", make)
    built(memory_gb=1.0)
    assert chunks == [10]
    chunks.clear()
    built(memory_gb=0.005)
    assert chunks == [10, 5, 2]
    line = r"1 of 10 clients .* needs about 0\.00\d+ GB, and memory_gb"
    with pytest.raises(UsageError, match=line):
        built(memory_gb=0.0005)
    with pytest.raises(UsageError, match="use fewer clients, a smaller chunk, model or batch_size"):
        built(memory_gb=0.005, chunk=10)


@pytest.mark.slow("programs at full size")
def test_a_thousand_clients_of_pfedla_fit_into_eight_gigabytes():
    settings = {
        "algorithm": "pfedla",
        "model": "lenet",
        "dataset": "synthetic",
        "clients": 1000,
        "clients_per_round": 100,
        "partition": "iid",
        "synthetic": {"shape": (32, 32, 3), "examples": 10_000, "classes": 10},
    }
    built(**settings, memory_gb=8.0)
    with pytest.raises(UsageError, match=r"needs about [67]\.\d+ GB"):
        built(**settings, memory_gb=3.0)


def test_all_gathered_bytes_equal_the_compiled_program(mesh):
    """Pads five items to eight in a loop; one of three results is unused."""

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
