"""Seconds and memory of the server in a round of a method that mixes the models of clients.

The same round with and without the server's work is timed in turns. Without it, a client trains
from a model that does not change, and the server stores nothing. Rounds have one local step,
because the server's work does not depend on the number of steps. A client's 20 steps are timed with
few clients. Times are CPU seconds of all cores, which excludes other work on the machine.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.libraries import work
from experiments.libraries.pool_rounds import MODELS, make_functions
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, PyTree, State
from fedjax_pfl.report import text_tables
from fedjax_pfl.simulation import execution_plan, memory_estimate, programs

STEPS, BATCH = 20, 32  # of a client in a round
_FEW = 20  # clients with all steps
_SIDE = 128  # clients of a product


def without_server(algorithm: Algorithm) -> Algorithm:
    """Returns a method whose clients do the same work and whose server does nothing.

    Every client downloads what client 0 downloads in the first round.
    """

    def init(key: jax.Array, start: State | None = None) -> State:
        state = algorithm.init(key, start)
        ctx = ClientContext(i=jnp.int32(0), data=None, t=jnp.int32(0), key=key)
        return State(algorithm.send(state._replace(clients=()), ctx), (), state.clients)

    def send(state: State, ctx: ClientContext) -> PyTree:
        return state.server

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, ()

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        raise AssertionError("rounds without a server are not evaluated")

    return algorithm._replace(
        init=init, send=send, receive=receive, personalize=personalize, offload=()
    )


class _Rounds:
    """Rounds of a method on all devices, compiled by the first of them.

    Args:
      method: Name of the method.
      clients: Number of clients.
      cohort: Number of clients in a round.
      epochs: Local steps of a client, because a client has one batch of examples.
      store: Where the state is kept, one of `programs.STORES`.
      settings: Settings of the method.
      change: Changes the method.
    """

    def __init__(
        self,
        method: str,
        clients: int,
        cohort: int,
        epochs: int,
        store: str,
        settings: Mapping[str, Any],
        change: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
    ) -> None:
        functions, data = make_functions(
            method,
            clients,
            cohort,
            train=BATCH,
            batch=BATCH,
            epochs=epochs,
            settings=settings,
            change=change,
            mesh=execution_plan.mesh(None, cohort, several=False),
            by_client=store == "sharded",
        )
        key = jax.random.key(0)
        self.program: Any = programs.make_program(functions, key, data, store=store)
        state = jax.eval_shape(functions.init, key)
        self.stored_bytes = memory_estimate.tree_bytes((state.server, state.rows))
        self.state = self.program.enter(self.program.init())
        self.t = 0
        self.seconds()

    def seconds(self) -> float:
        """Runs the next round and returns its CPU seconds."""
        began = time.process_time()
        self.state, _ = self.program.run(self.state, self.t, 1)
        jax.block_until_ready(jax.tree.leaves(self.state._replace(clients=())))
        self.t += 1
        return time.process_time() - began


def product_seconds(clients: int, cohort: int, parameters: int, repeats: int) -> float:
    """Returns the CPU seconds of the products of a round alone, the least of `repeats` tries.

    They are weights [K, N] times models [N, P], and changes of models [K, P] times models [P, N]:
    4 K N P operations.
    """
    side = min(_SIDE, cohort)
    models = jnp.ones((clients, parameters))
    weights, changes = jnp.ones((side, clients)), jnp.ones((side, parameters))
    mix = jax.jit(lambda weights, models: weights @ models)
    slopes = jax.jit(lambda changes, models: changes @ models.T)
    best = math.inf
    for _ in range(repeats + 1):  # the first one compiles
        began = time.process_time()
        jax.block_until_ready((mix(weights, models), slopes(changes, models)))
        best = min(best, time.process_time() - began)
    return best * cohort / side


def measure(
    method: str, clients: int, cohort: int, repeats: int, store: str, hidden: int
) -> dict[str, Any]:
    """Measures a round of LeNet in this process. Returns the entry of the results file.

    Seconds are the least of `repeats` turns. `hidden` is the number of hidden units of pFedLA's
    hypernetworks. Other arguments are those of `_Rounds`.
    """
    settings = {"hidden": hidden} if method == "pfedla" else {}
    cohort, few = min(cohort, clients), min(cohort, clients, _FEW)
    resident = work.resident_memory()
    with_server = _Rounds(method, clients, cohort, 1, store, settings)
    with_server.seconds()
    peak = work.peak_memory() - resident
    without = _Rounds(method, clients, cohort, 1, "device", settings, without_server)
    all_steps = _Rounds(method, clients, few, STEPS, "device", settings, without_server)
    rounds = (with_server, without, all_steps)
    turns = [tuple(part.seconds() for part in rounds) for _ in range(repeats)]
    seconds, seconds_without, seconds_few = map(min, zip(*turns, strict=True))
    stored = with_server.stored_bytes
    del with_server, without, all_steps, rounds
    server, training = max(0.0, seconds - seconds_without), seconds_few * cohort / few
    parameters = work.parameters(MODELS["lenet"][0](outputs=10))
    return {
        "clients": clients,
        "cohort": cohort,
        "store": store,
        "server": server,
        "training": training,
        "share": server / (server + training),
        "products": product_seconds(clients, cohort, parameters, repeats),
        "stored": stored,
        "peak": peak,
        "turns": turns,
    }


def line(row: Mapping[str, Any]) -> str:
    """Returns a result of `measure` as text."""
    peak = f"{row['peak'] / 1e9:.2f} GB"
    if row["stored"]:
        peak = f"{row['peak'] / row['stored']:.2f} x"
    return (
        f"server {row['server']:.2f} s, training {row['training']:.2f} s, "
        f"{100 * row['share']:.1f} %; products alone {row['products']:.2f} s; stored "
        f"{row['stored'] / 1e9:.2f} GB, peak {peak}"
    )


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> text_tables.Table:
    """Returns a table of results of `measure`, by method, or by method and setting.

    Rows of measurements that failed are left out.
    """
    rows = []
    for method, measured in results.items():
        finished = [row for row in measured if row["ok"]]
        for row in sorted(finished, key=lambda row: (row["clients"], row["store"])):
            name, _, detail = method.partition(", ")
            label = ", ".join(filter(None, (METHODS[name].title, detail)))
            label += f", {row['cohort']:,} of {row['clients']:,} clients"
            cells = [
                row["store"],
                f"{row['training']:.3g}",
                f"{row['server']:.3g}",
                f"{row['products']:.3g}",
                f"{100 * row['share']:.1f} %",
                f"{row['stored'] / 1e9:.3g}",
                f"{row['peak'] / 1e9:.3g}",
            ]
            rows.append([label, *cells])
    heads = [
        "store",
        "clients (s)",
        "server (s)",
        "products alone (s)",
        "server's share",
        "stored (GB)",
        "peak (GB)",
    ]
    return text_tables.Table("", heads, rows)
