"""Computes how each method's state grows with the number of clients, without training.

python -m experiments.scaling --clients=10,1000,1000000 --memory_gb=80 --model=lenet

Server: models, hypernetworks and routers, and what the server keeps for each client. Clients: what
stays with them, which a simulation holds as well. A visit: the arrays that one client fetches and
sends, as they are; with blocks, layers or zeros that do not travel the bill is smaller. Most: the
clients with which the state fills the memory. Mixing: what each of several devices receives from
the others in a round, with --cohort clients of the second of --clients, spread over --devices.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from fedjax_pfl.cli.command import run_script
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import ClientData, FederatedData, Split
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import memory_estimate
from fedjax_pfl.simulation.forecast import format_bytes
from fedjax_pfl.simulation.rounds import make_rounds

_EXAMPLES = 16  # of each client; they are not part of a state


class Sizes(NamedTuple):
    """Bytes."""

    server: int
    clients: int
    down: int  # one visit
    up: int

    @property
    def state(self) -> int:
        return self.server + self.clients


def sizes(method: str, clients: int, model: str = "lenet") -> Sizes:
    """Returns the sizes of a method with default settings for a number of clients."""
    algorithm, _ = _make_method(method, clients, model)
    key, i = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(algorithm.init, key)
    split = Split(jax.ShapeDtypeStruct((_EXAMPLES,), jnp.int32), i)
    images = jax.ShapeDtypeStruct((_EXAMPLES, 32, 32, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((_EXAMPLES,), jnp.int32)
    data = ClientData(images, labels, split, split, None, None, None, None)
    payload = jax.eval_shape(
        algorithm.send, state._replace(clients=()), ClientContext(i, None, i, key)
    )
    row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), state.clients)
    upload = jax.eval_shape(algorithm.train, payload, row, ClientContext(i, data, i, key)).upload
    count = memory_estimate.tree_bytes
    return Sizes(count(state[:2]), count(state.clients), count(payload), count(upload))


def _make_method(method: str, clients: int, model: str) -> tuple[Algorithm, Federation]:
    counts = np.full(clients, _EXAMPLES, np.int32)
    federation = Federation(
        counts, (32, 32, 3), 10, np.ones(clients, bool), np.zeros(clients, np.int32), counts
    )
    settings = configuration.default().get(method)
    factory = configuration.MODELS[model]
    norm = {"batch_norm": True} if method == "fedbn" and hasattr(factory, "batch_norm") else {}
    training = local_training.sgd(epochs=1, batch_size=_EXAMPLES)
    algorithm = configuration.ALGORITHMS[method](
        factory(outputs=10, **norm),
        training,
        federation,
        **(settings.to_dict() if settings else {}),
    )
    return algorithm, federation


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gathered(method: str, clients: int, model: str = "lenet") -> tuple[int, int]:
    """Bytes that all-gathers bring from each client's device to the others.

    Of a client of a cohort, and of one that is evaluated.
    """
    algorithm, federation = _make_method(method, clients, model)
    mesh = jax.make_mesh(
        (1,), ("clients",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    rounds = make_rounds(algorithm, federation, cohort=4, mesh=mesh)
    split = Split(_array(clients, _EXAMPLES), _array(clients))
    images = _array(_EXAMPLES, 32, 32, 3, dtype=jnp.float32)
    data = FederatedData(images, _array(_EXAMPLES), split, split, split)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(rounds.init, key)
    round_ = memory_estimate.all_gather_bytes(rounds.run, key, state, data, _array(), _array())
    evaluation = memory_estimate.all_gather_bytes(rounds.evaluate, key, state, data, _array())
    return round_ // 4, evaluation // clients


def received(bytes_per_client: int, cohort: int, devices: int) -> int:
    """Bytes that one device gets from the others; their last clients may be padding."""
    return (devices - 1) * -(-cohort // devices) * bytes_per_client


class Growth(NamedTuple):
    """Bytes of the state as a polynomial in the number of clients."""

    fixed: float
    per_client: float
    pairs: float

    @property
    def name(self) -> str:
        return "N²" if self.pairs else "N" if self.per_client else "1"

    def most(self, budget: float) -> float:
        """The largest number of clients whose state fits; infinite where none is too large."""
        free = budget - self.fixed
        if self.pairs:
            return (
                (math.sqrt(self.per_client**2 + 4 * self.pairs * free) - self.per_client)
                / 2
                / self.pairs
            )
        return free / self.per_client if self.per_client else math.inf


def growth(method: str, model: str) -> Growth:
    """Fits the polynomial to third numbers of clients."""
    first, second, third = (sizes(method, n, model).state for n in (400, 800, 1200))
    pairs = (third - 2 * second + first) / (2 * 400**2)
    # Below a byte for per_client pair of 40 clients it is a table of another dtype, or rounding.
    pairs = pairs if pairs > 1e-3 else 0.0
    per_client = (second - first) / 400 - 1200 * pairs
    per_client = per_client if per_client > 1e-3 else 0.0
    return Growth(first - 400 * per_client - 400**2 * pairs, per_client, pairs)


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    given = flags.FLAGS
    columns = [_number(word) for word in given.clients]
    unknown = sorted(set(given.methods) - set(configuration.ALGORITHMS))
    if unknown:
        raise UsageError(f"--methods has {', '.join(unknown)}; see fedjax-pfl list methods")
    if given.model not in configuration.MODELS:
        choices = ", ".join(configuration.MODELS)
        raise UsageError(f"--model={given.model} is none of {choices}")
    middle = columns[min(1, len(columns) - 1)]
    cohort = min(given.cohort, middle)
    heads = [*(f"N = {n:,}" for n in columns), "grows", "most", "down", "up", "mixing"]
    widths = [max(12, len(head) + 2) for head in heads]
    print("state".ljust(15) + "".join(h.rjust(w) for h, w in zip(heads, widths, strict=True)))
    results: dict[str, Any] = {}
    for method in given.methods or sorted(configuration.ALGORITHMS):
        sizes_by_clients = {n: sizes(method, n, given.model) for n in columns}
        grows = growth(method, given.model)
        largest = grows.most(given.memory_gb * 1e9)
        ctx = sizes_by_clients[columns[0]]
        a_round, evaluation = gathered(method, middle, given.model)
        mixing = received(a_round, cohort, given.devices)
        results[method] = {
            "bytes": {str(n): sizes_by_clients[n]._asdict() for n in columns},
            "grows": grows._asdict(),
            "most": None if math.isinf(largest) else int(largest),
            "gathered": {"visit": a_round, "evaluated": evaluation, "round": mixing},
        }
        cells = [
            *(format_bytes(sizes_by_clients[n].state) for n in columns),
            grows.name,
            "any" if math.isinf(largest) else f"{largest:,.0f}",
            format_bytes(ctx.down),
            format_bytes(ctx.up),
            format_bytes(mixing),
        ]
        print(method.ljust(15) + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))
    if given.out:
        parts = {
            "model": given.model,
            "memory_gb": given.memory_gb,
            "mixing": {"clients": middle, "cohort": cohort, "devices": given.devices},
            "methods": results,
        }
        Path(given.out).write_text(json.dumps(parts, indent=2) + "\n")


def _number(word: str) -> int:
    if not word.isdecimal() or not 4 <= int(word) <= 10**7:
        raise UsageError(f"--clients has {word!r}; give whole numbers from 4 to 10⁷")
    return int(word)


if __name__ == "__main__":
    # Here, because other commands have a --clients of their own.
    flags.DEFINE_list("clients", ["10", "1000", "1000000"], "Numbers of clients.")
    flags.DEFINE_float("memory_gb", 80.0, "Memory that the state may fill.", lower_bound=0.1)
    flags.DEFINE_string("model", "lenet", "Network, on 32x32x3 examples with ten classes.")
    flags.DEFINE_list("methods", [], "Methods. Default: all.")
    flags.DEFINE_integer("cohort", 100, "Clients in a round, for mixing.", lower_bound=1)
    flags.DEFINE_integer("devices", 8, "Devices that they are spread over.", lower_bound=1)
    flags.DEFINE_string("out", None, "JSON file to write the numbers to.")
    run_script(main, __doc__)
