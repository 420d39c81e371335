"""Times of the same steps with different lowerings, chunks and precisions.

The choices of `conv = auto` and of an unset `chunk` rest on such measurements.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from experiments.libraries import work
from fedjax_pfl.report.text_tables import Table
from fedjax_pfl.settings.general import SETTINGS

LOWERINGS = tuple(name for name in SETTINGS["conv"].choices if name not in ("auto", "fused"))
PRECISIONS = {"float32": "highest", "bfloat16": "BF16_BF16_F32"}  # added to the default of JAX
_BATCH = 32


class Size(NamedTuple):
    """Number of clients and gradient steps per client for a network."""

    clients: int
    steps: int
    lowerings: tuple[str, ...] = LOWERINGS
    fused: bool = False  # whether the network has the block that `conv = fused` computes


SIZES = {
    "lenet": Size(100, 4, fused=True),
    "resnet9": Size(20, 2),
    "mlp": Size(100, 4, lowerings=()),
}


class Layout(NamedTuple):
    """Settings of one measurement; None is the default."""

    conv: str = "auto"
    chunk: int | None = None  # all clients
    precision: str | None = None


def layouts(size: Size) -> dict[str, Layout]:
    """Returns the compared layouts by name; each differs from the first in one setting."""
    is_fused = size.fused and jax.default_backend() == "gpu"
    return {
        f"all {size.clients} at a time, conv=auto, JAX's precision": Layout(),
        **{f"conv={name}": Layout(conv=name) for name in size.lowerings},
        **{f"{chunk} at a time": Layout(chunk=chunk) for chunk in (1, 10)},
        **{f"products in {name}": Layout(precision=name) for name in PRECISIONS},
        # Last: should its kernels fail to compile, the other layouts are measured.
        **({"conv=fused": Layout(conv="fused")} if is_fused else {}),
    }


def measured(
    network: str, size: Size, repeats: int, save: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Returns the median milliseconds of a client step in every layout.

    Each layout is timed in turns with the first one before the next is compiled, because compiling
    for a GPU times candidate kernels. `save` gets the result so far after each layout, so an
    interrupted measurement keeps its finished layouts.
    """
    layouts_of_network = layouts(size)
    steps = size.clients * size.steps
    result: dict[str, Any] = {
        "clients": size.clients,
        "steps": size.steps,
        "batch": _BATCH,
        "repeats": repeats,
        "ms_per_client_step": {},
        "times_the_first": {},
    }
    baseline: Callable[[], None] | None = None
    for name, layout in layouts_of_network.items():
        run = _compiled(network, size, layout)
        run()  # allocates and loads what the first call needs
        baseline = baseline or run
        pairs = [(_seconds(baseline), _seconds(run)) for _ in range(repeats)]
        median = statistics.median(seconds for _, seconds in pairs)
        ratio = statistics.median(seconds / first for first, seconds in pairs)
        result["ms_per_client_step"][name] = float(f"{1000 * median / steps:.4g}")
        result["times_the_first"][name] = float(f"{ratio:.4g}")
        save(result)
    return result


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _compiled(network: str, size: Size, layout: Layout) -> Callable[[], None]:
    item = work.Work(
        network,
        network=network,
        clients=size.clients,
        cohort=size.clients,
        examples=size.steps * _BATCH,
        batch=_BATCH,
        settings={"conv": layout.conv, "chunk": layout.chunk or size.clients},
    )
    with jax.default_matmul_precision(layout.precision and PRECISIONS[layout.precision]):
        return work.compiled(item).run


def table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns a table with a row for each network and layout."""
    rows = [
        [f"{network}: {name}", f"{ms:.3g}", f"{result['times_the_first'][name]:.2f}"]
        for network, result in results.items()
        for name, ms in result["ms_per_client_step"].items()
    ]
    return Table("Time of a client step by layout.", ["ms per client step", "relative"], rows)
