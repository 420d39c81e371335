"""Computes how the state of each method grows with the number of clients, without training.

python -m experiments.scaling --clients=10,1000,1000000 --memory_gb=80 --model=lenet

state   bytes of server-side and client-side state together, which a simulation holds
grows   order of growth with the number of clients N
most    number of clients whose state fills --memory_gb
down    arrays that one client downloads in a round, with the first of --clients; traffic is less if
        some are not sent
up      arrays that one client uploads
mixing  bytes that each of --devices devices receives from the others in a round, with --cohort
        clients per round and the second of --clients

Methods that need another network than --model are left out.
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

from experiments.flag_checks import require_folders
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
_SHAPE = (32, 32, 3)  # of an example


def takes_images(model: str) -> bool:
    """Returns True if a network takes the examples, which are images."""
    network = configuration.MODELS[model](outputs=10)
    try:
        jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, *_SHAPE)))
    except Exception:  # flax raises any type if an input does not fit a layer
        return False
    return True


class Sizes(NamedTuple):
    """Bytes of a method."""

    server: int
    clients: int
    down: int  # of one client in a round
    up: int

    @property
    def state(self) -> int:
        """Returns the bytes of server-side and client-side state."""
        return self.server + self.clients


def sizes(method: str, clients: int, model: str = "lenet") -> Sizes:
    """Returns the sizes of a method with default settings for a number of clients."""
    algorithm, _ = _make_method(method, clients, model)
    key, i = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(algorithm.init, key)
    split = Split(jax.ShapeDtypeStruct((_EXAMPLES,), jnp.int32), i)
    images = jax.ShapeDtypeStruct((_EXAMPLES, *_SHAPE), jnp.float32)
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
    """Returns a method with default settings, and its federation without examples."""
    counts = np.full(clients, _EXAMPLES, np.int32)
    federation = Federation(
        counts, _SHAPE, 10, np.ones(clients, bool), np.zeros(clients, np.int32), counts
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
    """Returns the bytes that all-gathers send from each client's device to the others.

    The first number is per client of a cohort, the second per evaluated client.
    """
    algorithm, federation = _make_method(method, clients, model)
    mesh = jax.make_mesh(
        (1,), ("clients",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    rounds = make_rounds(algorithm, federation, cohort=4, mesh=mesh)
    split = Split(_array(clients, _EXAMPLES), _array(clients))
    images = _array(_EXAMPLES, *_SHAPE, dtype=jnp.float32)
    data = FederatedData(images, _array(_EXAMPLES), split, split, split)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(rounds.init, key)
    round_ = memory_estimate.all_gather_bytes(rounds.run, key, state, data, _array(), _array())
    evaluation = memory_estimate.all_gather_bytes(rounds.evaluate, key, state, data, _array())
    return round_ // 4, evaluation // clients


def received(bytes_per_client: int, cohort: int, devices: int) -> int:
    """Returns the bytes that one device receives from the others, padding included."""
    return (devices - 1) * -(-cohort // devices) * bytes_per_client


class Growth(NamedTuple):
    """Bytes of the state as a polynomial in the number of clients."""

    fixed: float
    per_client: float
    pairs: float

    @property
    def name(self) -> str:
        """Returns the order of growth."""
        return "N²" if self.pairs else "N" if self.per_client else "1"

    def most(self, budget: float) -> float:
        """Returns the most clients whose state fits into `budget` bytes, or infinity."""
        if (free := budget - self.fixed) < 0:
            return 0.0
        if self.pairs:
            root = math.sqrt(self.per_client**2 + 4 * self.pairs * free)
            return (root - self.per_client) / 2 / self.pairs
        return free / self.per_client if self.per_client else math.inf


def growth(method: str, model: str) -> Growth:
    """Returns the polynomial through the sizes with 400, 800 and 1,200 clients."""
    first, second, third = (sizes(method, n, model).state for n in (400, 800, 1200))
    pairs = (third - 2 * second + first) / (2 * 400**2)
    # Less than a byte per pair of 40 clients is rounding or a table of another dtype.
    pairs = pairs if pairs > 1e-3 else 0.0
    per_client = (second - first) / 400 - 1200 * pairs
    per_client = per_client if per_client > 1e-3 else 0.0
    return Growth(first - 400 * per_client - 400**2 * pairs, per_client, pairs)


def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    flag_values = flags.FLAGS
    columns = [_number(text) for text in flag_values.clients or [""]]
    unknown = sorted(set(flag_values.methods) - set(configuration.ALGORITHMS))
    if unknown:
        raise UsageError(f"--methods has {', '.join(unknown)}; see fedjax-pfl list methods")
    if flag_values.model not in configuration.MODELS:
        choices = ", ".join(configuration.MODELS)
        raise UsageError(f"--model={flag_values.model} is none of {choices}")
    if not takes_images(flag_values.model):
        choices = ", ".join(filter(takes_images, configuration.MODELS))
        raise UsageError(f"--model={flag_values.model} does not take images; use one of {choices}")
    require_folders(flag_values, "out")
    middle = columns[min(1, len(columns) - 1)]
    cohort = min(flag_values.cohort, middle)
    heads = [*(f"N = {n:,}" for n in columns), "grows", "most", "down", "up", "mixing"]
    widths = [max(12, len(head) + 2) for head in heads]
    print("state".ljust(15) + "".join(h.rjust(w) for h, w in zip(heads, widths, strict=True)))
    results: dict[str, Any] = {}
    for method in flag_values.methods or sorted(configuration.ALGORITHMS):
        try:
            sizes_by_clients = {n: sizes(method, n, flag_values.model) for n in columns}
        except UsageError as error:  # the network lacks what the method needs
            print(f"{method.ljust(15)}left out: {error}")
            continue
        grows = growth(method, flag_values.model)
        largest = grows.most(flag_values.memory_gb * 1e9)
        first = sizes_by_clients[columns[0]]
        a_round, evaluation = gathered(method, middle, flag_values.model)
        mixing = received(a_round, cohort, flag_values.devices)
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
            format_bytes(first.down),
            format_bytes(first.up),
            format_bytes(mixing),
        ]
        print(method.ljust(15) + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))
    if flag_values.out:
        parts = {
            "model": flag_values.model,
            "memory_gb": flag_values.memory_gb,
            "mixing": {"clients": middle, "cohort": cohort, "devices": flag_values.devices},
            "methods": results,
        }
        Path(flag_values.out).write_text(json.dumps(parts, indent=2) + "\n")


def _number(text: str) -> int:
    if not text.isdecimal() or not 4 <= int(text) <= 10**7:
        raise UsageError(f"--clients has {text!r}; give whole numbers from 4 to 10⁷")
    return int(text)


if __name__ == "__main__":
    # Here, because other commands have flags of these names.
    flags.DEFINE_list("clients", ["10", "1000", "1000000"], "Numbers of clients.")
    flags.DEFINE_float("memory_gb", 80.0, "Memory that the state may fill.", lower_bound=0.1)
    flags.DEFINE_string("model", "lenet", "Network, for 32x32x3 images of ten classes.")
    flags.DEFINE_list("methods", [], "Methods. Default: all.")
    flags.DEFINE_integer("cohort", 100, "Clients in a round, for mixing.", lower_bound=1)
    flags.DEFINE_integer("devices", 8, "Devices, for mixing.", lower_bound=1)
    flags.DEFINE_string("out", None, "JSON file to write the numbers to.")
    run_script(main, __doc__)
