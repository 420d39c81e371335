"""Device time of a workload by kernel, from JAX's profiler."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.libraries import work
from fedjax_pfl.report.text_tables import Table

# Events that only contain others, on CPU threads.
_CONTAINERS = ("ThunkExecutor", "while", "conditional", "call", "Rendezvous", "end: ")
_LONGEST = 20  # kernels that are listed by name; the rest is summed


def profile(item: work.Work) -> dict[str, Any]:
    """Runs an item once under the profiler and returns its device time by kernel."""
    run = work.compiled(item).run
    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
        traces = sorted(Path(folder).rglob("*.xplane.pb"))
        events = [event for path in traces for event in device_events(path)]
    return {"client_steps": item.client_steps, "seconds": seconds, **summary(events, seconds)}


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
        for kernel in profiled["kernels"][:most]:
            share = 100 * kernel["seconds"] / device_seconds
            microseconds = 1e6 * kernel["seconds"] / steps
            rows.append([f"{name}: {kernel['name'][:60]}", f"{microseconds:.3g}", f"{share:.1f} %"])
    return Table(
        "Device time by kernel.", ["microseconds per client step", "share of device time"], rows
    )
