"""Ways to compute the same steps, side by side: lowerings, clients at a time, precisions.

What `conv = auto` and an unset `chunk` choose rests on such measurements.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from experiments.speed import work
from fedjax_pfl.config.settings import ROWS
from fedjax_pfl.report.text_tables import Table

LOWERINGS = tuple(name for name in ROWS["conv"].choices if name != "auto")
PRECISIONS = {"float32": "highest", "bfloat16": "BF16_BF16_F32"}  # besides JAX's own
_BATCH = 32


class Size(NamedTuple):
    """How much a network does: clients, and gradient steps of each."""

    clients: int
    steps: int
    lowerings: tuple[str, ...] = LOWERINGS


SIZES = {"lenet": Size(100, 4), "resnet9": Size(20, 2), "mlp": Size(100, 4, lowerings=())}


class Layout(NamedTuple):
    """One way to do it; what is None is as it usually is."""

    conv: str = "auto"
    chunk: int | None = None  # all clients
    precision: str | None = None


def layouts(size: Size) -> dict[str, Layout]:
    """All ways that are compared, by what they are called: each differs from the first in one."""
    return {
        f"all {size.clients} at a time, conv=auto, JAX's precision": Layout(),
        **{f"conv={name}": Layout(conv=name) for name in size.lowerings},
        **{f"{chunk} at a time": Layout(chunk=chunk) for chunk in (1, 10)},
        **{f"products in {name}": Layout(precision=name) for name in PRECISIONS},
    }


def measured(network: str, size: Size, repeats: int) -> dict[str, Any]:
    """Milliseconds of a client step in every layout: medians.

    They take turns, so that what disturbs one of them disturbs all alike. They are compiled one
    after the other: on a GPU, compiling tries kernels out by their time.
    """
    every = layouts(size)
    runs = {name: _compiled(network, size, one) for name, one in every.items()}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for run in runs.values():
        run()  # what is allocated and loaded at the first call
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    steps = size.clients * size.steps
    return {
        "clients": size.clients,
        "steps": size.steps,
        "batch": _BATCH,
        "repeats": repeats,
        "ms_per_client_step": {
            name: float(f"{1000 * statistics.median(own) / steps:.4g}")
            for name, own in seconds.items()
        },
    }


def _compiled(network: str, size: Size, one: Layout) -> Callable[[], None]:
    item = work.Work(
        network,
        network=network,
        clients=size.clients,
        cohort=size.clients,
        examples=size.steps * _BATCH,
        batch=_BATCH,
        settings={"conv": one.conv, "chunk": one.chunk or size.clients},
    )
    with jax.default_matmul_precision(one.precision and PRECISIONS[one.precision]):
        return work.ours(item).run


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """By network: a way, its time, and how it is to the first."""
    rows = []
    for network, own in found.items():
        times = own["ms_per_client_step"]
        first = next(iter(times.values()))
        rows += [
            [f"{network}: {name}", f"{ms:.3g}", f"{ms / first:.2f}"] for name, ms in times.items()
        ]
    return Table(
        "One client step, computed in several ways.", ["ms a client step", "to the first"], rows
    )
