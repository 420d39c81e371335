"""Device time of a workload by kernel and by part of the work, from JAX's profiler."""

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.libraries import work
from fedjax_pfl.report.text_tables import Table

PROFILED = ("lenet-10", "lenet-100", "mlp", "resnet9", "pfedhn", "simulation")  # workloads
# Events that only contain others, on CPU threads.
_CONTAINERS = ("ThunkExecutor", "while", "cond", "call", "Rendezvous", "end: ")
_LONGEST = 20  # kernels that are listed by name; the rest is summed
PRODUCTS, OTHER_WORK = "matrix products", "rest: downloads, uploads, average, copies of XLA"
# Parts of the work by pattern of the scope in which an instruction was traced; the first match.
_PARTS = {
    r"/batch/": "batches: gather, normalise",
    r"/optimizer/": "optimiser",
    r"/max_pool/": "pooling",
    r"jvp\(.*/conv\d+/": "convolutions without products: windows, transforms, bias",
    r"jvp\(.*/Dropout_\d+/": "dropout",
    r"jvp\(": "other layers, loss",
}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) .*\{$")


def profile(item: work.Work) -> dict[str, Any]:
    """Runs an item once under the profiler. Returns its device time by kernel and by part."""
    workload = work.compiled(item)
    run = workload.run
    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
        traces = sorted(Path(folder).rglob("*.xplane.pb"))
        events = [event for path in traces for event in device_events(path)]
    return {
        "client_steps": item.client_steps,
        "seconds": seconds,
        **summary(events, seconds),
        "parts": by_part(events, parts_of_program(workload.program())),
    }


def parts_of_program(program: str) -> dict[str, str]:
    """Returns the part of the work of each instruction of a compiled program, as HLO text.

    A fusion with a product is a product, whatever else it computes.
    """
    lines: dict[str, tuple[str, str]] = {}  # by instruction: line and opcode
    products, computation = set(), ""
    for line in program.splitlines():
        if match := _INSTRUCTION.match(line):
            lines[match[1]] = (line, match[2])
            if match[2] in ("dot", "convolution"):
                products.add(computation)
        elif match := _COMPUTATION.match(line):
            computation = match[1]

    def part(line: str, opcode: str) -> str:
        callee = re.search(r"calls=%?([\w.-]+)", line)
        if opcode in ("dot", "convolution") or (callee and callee[1] in products):
            return PRODUCTS
        scope = re.search(r'op_name="([^"]*)"', line)
        matches = (name for key, name in _PARTS.items() if scope and re.search(key, scope[1]))
        return next(matches, OTHER_WORK)

    return {name: part(*described) for name, described in lines.items()}


def by_part(events: Iterable[tuple[str, float]], parts: Mapping[str, str]) -> dict[str, float]:
    """Returns the seconds of each part of the work, most first. `events` have nanoseconds."""
    total: dict[str, float] = defaultdict(float)
    for name, nanoseconds in events:
        total[parts.get(name, OTHER_WORK)] += nanoseconds / 1e9
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def device_events(trace: Path) -> Iterable[tuple[str, float]]:
    """Yields (kernel, nanoseconds) of everything that ran on an accelerator, or on CPU threads."""
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            streams = line.name.startswith("Stream") if devices else "XLA" in line.name
            for event in line.events if streams else ():
                if not devices and event.name.startswith(_CONTAINERS):
                    continue
                yield event.name, event.duration_ns


def summary(events: Iterable[tuple[str, float]], seconds: float) -> dict[str, Any]:
    """Returns seconds and launches by kernel, longest first, and the fraction of time in use."""
    total: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for name, nanoseconds in events:
        total[name] += nanoseconds / 1e9
        launches[name] += 1
    ordered = sorted(total, key=lambda name: -total[name])
    in_use = sum(total.values())
    return {
        "device_seconds": in_use,
        "fraction_in_use": in_use / seconds,
        "launches": sum(launches.values()),
        "kernels": [
            {"name": name, "seconds": total[name], "launches": launches[name]}
            for name in ordered[:_LONGEST]
        ],
        "other_seconds": sum(total[name] for name in ordered[_LONGEST:]),
    }


def table(profiles: Mapping[str, Mapping[str, Any]], most: int = _LONGEST) -> Table:
    """Returns a table with a row for each item and each of its `most` longest kernels."""
    rows = []
    for name, profiled in profiles.items():
        steps, device_seconds = profiled["client_steps"], profiled["device_seconds"] or 1.0
        seconds = list(profiled.get("parts", {}).items())
        # Several kernels can share the first 60 letters of their names.
        seconds += [
            (kernel["name"][:60], kernel["seconds"]) for kernel in profiled["kernels"][:most]
        ]
        for part, part_seconds in seconds:
            share = 100 * part_seconds / device_seconds
            microseconds = 1e6 * part_seconds / steps
            rows.append([f"{name}: {part}", f"{microseconds:.3g}", f"{share:.1f} %"])
    return Table(
        "Device time by part of the work, and by kernel.",
        ["microseconds per client step", "share of device time"],
        rows,
    )
