"""The same work by us and by a plain PyTorch loop, in turn, as ratios.

python -m experiments.benchmark                      prints a table
python -m experiments.benchmark --out=FILE.json      and writes it

Needs the extra `[bench]` (PyTorch). Work: FedAvg's local training of LeNet on 32x32x3 images, 10
clients x 20 steps x 32 examples. The two take turns (A B A B ...), and what counts is the median of
the ratios of neighbours: on a shared machine a single time says nothing.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.launch import prepare_devices
from fedjax_pfl import data
from fedjax_pfl.build import build
from fedjax_pfl.config import complete

_OUT = flags.DEFINE_string("out", None, "Write the measurements to this JSON file.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "How often the two take turns.", lower_bound=3)

CLIENTS, STEPS, BATCH, EXAMPLES = 10, 20, 32, 600


def ours() -> tuple[Callable[[], None], data.FederatedData]:
    """One compiled round, and the data that it reads."""
    config = complete(
        {
            "dataset": "synthetic",
            "synthetic": {"shape": (32, 32, 3), "examples": CLIENTS * EXAMPLES * 10 // 7 + 100},
            "partition": "iid",
            "clients": CLIENTS,
            "model": "lenet",
            "local_steps": STEPS,
            "batch_size": BATCH,
            "rounds": 1,
        }
    )
    built = build(config)
    (phase,) = built.phases
    place = phase.rounds.place
    key, arrays = place((jax.random.key(0), built.data))
    t, n = place((jnp.int32(0), jnp.int32(1)))
    state = phase.rounds.init(key)

    def one_round() -> None:
        nonlocal state
        state, _ = phase.rounds.run(key, state, arrays, t, n)
        jax.block_until_ready(state)

    return one_round, built.data


def theirs(arrays: data.FederatedData) -> Callable[[], float]:
    """The same round in PyTorch on the same examples."""
    from third_party.torch_loop import fedavg_round

    rows = np.asarray(arrays.train.rows)[:, :EXAMPLES]
    x = np.asarray(arrays.x, np.float32)[rows]
    return fedavg_round(x, np.asarray(arrays.y)[rows], steps=STEPS, batch_size=BATCH, rate=0.01)


def compare(a: Callable[[], Any], b: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Seconds of each in turn, and how many times faster a is: median and range."""
    a(), b()  # compiled and warm
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(repeats):
        for name, work in (("ours", a), ("torch", b)):
            began = time.perf_counter()
            work()
            seconds[name].append(round(time.perf_counter() - began, 4))
    ratios = np.divide(seconds["torch"], seconds["ours"])
    return {
        "times_faster": round(float(np.median(ratios)), 2),
        "range": [round(float(r), 2) for r in (ratios.min(), ratios.max())],
        "seconds": seconds,
    }


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    del argv
    prepare_devices()
    one_round, arrays = ours()
    result = {
        "work": f"LeNet, {CLIENTS} clients x {STEPS} steps x {BATCH}",
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {jax.default_backend()}",
        "versions": {name: metadata.version(name) for name in ("jax", "flax", "torch")},
        **compare(one_round, theirs(arrays), _REPEATS.value),
    }
    low, high = result["range"]
    print(f"{result['work']}, {result['machine']}")
    print(f"{result['times_faster']} x PyTorch (median of {_REPEATS.value}; {low} to {high})")
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
