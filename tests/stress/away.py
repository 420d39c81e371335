"""Clients that are absent, in a simulation too, and what a federation is compared with."""

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.randomness import DROP, stage_key
from fedjax_pfl.deploy import run, server
from fedjax_pfl.deploy.programs import Method
from fedjax_pfl.runs import export, runner
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation import rounds as engine
from tests import cases, tiny
from tests.deploy.loopback import loopback, stacked
from tests.stress.common import Row
from tests.stress.over_flower import NODES, Federation

CLIENTS, AWAY = 6, 2


@contextlib.contextmanager
def dropping(away: Mapping[int, list[int]], clients: int) -> Iterator[None]:
    """A simulation with dropout=0.5 drops these clients, by round, and no others."""
    draws = jnp.stack([jax.random.key_data(key) for key in jax.random.split(jax.random.key(0), 9)])
    uniform = [float(jax.random.uniform(jax.random.wrap_key_data(key))) for key in draws]
    keep, drop = (draws[int(pick(uniform))] for pick in (np.argmax, np.argmin))
    last = max(away, default=-1)
    table = np.zeros((last + 2, clients), bool)
    for t, ids in away.items():
        table[t, ids] = True

    def key(base: Any, stage: int, *more: Any) -> Any:
        if stage != DROP:
            return stage_key(base, stage, *more)
        t, i = more
        gone = jnp.asarray(table)[jnp.minimum(t, last + 1), i]
        return jax.random.wrap_key_data(jnp.where(gone, drop, keep))

    with mock.patch.object(engine, "stage_key", key):
        yield


def differences(one: Federation) -> list[str]:
    """Of a run that has ended, from the simulation with the same absences."""
    lines = [json.loads(x) for x in (one.place / "run" / run.WIRE).read_text().splitlines()]
    if [line["round"] for line in lines] != list(range(1, one.config["rounds"] + 1)):
        return [f"rounds {[line['round'] for line in lines]}"]
    away = {line["round"] - 1: line["absent"] for line in lines}
    config = json.loads((one.place / "run" / "config.json").read_text())
    config = {**config, "dropout": 0.5, "devices": 1}
    del config["deployed"]
    with dropping(away, NODES):
        simulated = runner.run(config, one.place / f"simulated-{time.time()}")
    found = []
    if not near(metrics(one.place / "run"), metrics(simulated.directory)):
        found.append("evaluations")
    for name in ("clients.csv", "traffic.json"):
        pair = [(path / name).read_text() for path in (one.place / "run", simulated.directory)]
        if not near(*map(numbers, pair)):
            found.append(name)
    wanted = dict(
        export.personalize(simulated, simulated.state, one.config["rounds"], range(NODES))
    )
    for i in range(NODES):
        (path,) = one.nodes.glob(f"node-{i}/run-*/model.safetensors")
        if not near(export.load(path)[1], wanted[i]):
            found.append(f"model of client {i}")
    return found


def metrics(directory: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in line.items() if "seconds" not in k and k != "remarks"} for line in lines
    ]


def numbers(text: str) -> tuple[str, list[float]]:
    """The words of a file, and its numbers."""
    number = r"-?\d+\.?\d*(?:[eE][-+]?\d+)?"
    return re.sub(number, "#", text), [float(n) for n in re.findall(number, text)]


def near(got: Any, wanted: Any) -> bool:
    """Equal but for rounding."""
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        return False
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return all(a == b if isinstance(a, str) else np.allclose(a, b, 1e-6, 1e-6) for a, b in pairs)


def absent(rounds: int = 50, seed: int = 0) -> Row:
    """Two of six clients are absent in each of so many rounds, with both sides in this process."""
    data, federation = tiny.federated(clients=CLIENTS)
    algorithm = cases.make("fedper", federation)
    rng = np.random.default_rng(seed)
    away = {t: rng.choice(CLIENTS, AWAY, replace=False).tolist() for t in range(rounds)}
    how = {"cohort": CLIENTS, "max_rounds": rounds, "dropout": 0.5}
    with dropping(away, CLIENTS):
        made = engine.make_rounds(algorithm, federation, **how)
        key = jax.random.key(seed)
        state, logs = made.run(key, made.init(key), data, np.int32(0), np.int32(rounds))
    wanted = jax.device_get(state)
    simulated = ledger.add(ledger.empty(CLIENTS), jax.device_get(logs), rounds)
    with tempfile.TemporaryDirectory(prefix="absent-") as name:
        method = Method(algorithm, federation, seed)
        both = loopback(method, data, CLIENTS, Path(name))
        standing, moved = server.begin(both.server), ledger.empty(CLIENTS)
        for t in range(rounds):
            standing, logs = both.round(standing, t, away[t].__contains__)
            moved = ledger.add(moved, logs, 1)
        own = stacked([both.own_state(standing, i) for i in range(CLIENTS)])
    wrong = [] if near((standing.state.server, own), (wanted.server, wanted.clients)) else ["state"]
    wrong += [] if moved == simulated else ["bytes"]
    note = ", ".join(wrong) or "in one process; states and bytes are the same"
    lost = rounds if wrong else 0
    return Row("two of six nodes absent in a round", rounds, rounds - lost, lost, note)
