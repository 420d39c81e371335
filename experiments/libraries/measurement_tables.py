"""Markdown tables of the measurements in experiments/results, for pages."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import benchmark
from experiments.libraries import layouts, rivals, roofline, turns
from fedjax_pfl.report import text_tables

RESULTS = Path(__file__).parents[1] / "results"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with left-aligned cells."""
    table = text_tables.markdown([text_tables.Table("", list(head), [list(row) for row in rows])])
    return table.replace("---:", "---")


def load(name: str) -> Any:
    """Reads a JSON file of results."""
    return json.loads((RESULTS / name).read_text())


def speed(name: str) -> str:
    """Returns the tables of a measurement by `experiments.benchmark`, and its conditions."""
    record = load(name)
    rival_names = {key: None for item in record["items"].values() for key in item["who"]}
    del rival_names["library"]
    device = record["machine"]["device"]
    parts = [_speedups(record["items"], list(rival_names), device)] if rival_names else []
    parts += [layouts.table(part) for part in [record.get("layouts")] if part]
    return f"{text_tables.markdown(parts)}\n\nMeasured on {benchmark.conditions(record)}."


def goals(*names: str) -> str:
    """Returns the goals of machines: met, missed or not measured."""
    parts = [turns.targets(load(name), rivals.NAMES) for name in names]
    # Compile times, which have no device in their names, need one machine only.
    has_device = ("CPU", "GPU")
    rows = [row for part in parts for row in part.rows if row[1] or row[0].startswith(has_device)]
    return text_table(parts[0].heads, rows)


def _speedups(
    items: Mapping[str, Any], rival_names: Sequence[str], device: str
) -> text_tables.Table:
    """Returns a table of the workloads with the speedup over each rival."""
    rows = []
    for name, item in items.items():
        timing, row = item["who"]["library"], [item["about"]]
        row.append(f"{timing['ms_per_client_step']:.3g}")
        for entry in map(item["who"].get, rival_names):
            low, high = entry["range"] if entry else (0, 0)
            row.append(f"{entry['times_faster']:.2f} x ({low:.2f}-{high:.2f})" if entry else "")
        of_roofline = roofline.share(name, item, device)
        shares = [timing["share_of_peak"][0], of_roofline]
        cells = ["" if share is None else f"{100 * share:.0f} %" for share in shares]
        rows.append([*row, f"{item['compile_seconds']:.1f}", *cells])
    speedups = [rivals.NAMES[name] for name in rival_names]
    heads = ["ms per client step", *speedups, "compile (s)", "of peak", "of roofline"]
    return text_tables.Table("", heads, rows)


def rounds(name: str, rival: str) -> str:
    """Returns seconds and peak memory of a round by number of clients, with those of a rival."""
    record = load(name)
    rows = []
    for item in record["items"].values():
        library_results, rival_results = item["who"]["library"], item["who"][rival]
        low, high = rival_results["range"]
        rows.append(
            [
                f"{item['clients']:,} clients",
                *(f"{entry['seconds']:.3g}" for entry in (library_results, rival_results)),
                f"{rival_results['times_faster']:.2f} x ({low:.2f}-{high:.2f})",
                *(
                    f"{entry['peak_bytes'] / 2**30:.1f}"
                    for entry in (library_results, rival_results)
                ),
            ]
        )
    their = rivals.NAMES[rival]
    heads = ["seconds a round", their, "speedup", "peak memory (GiB)", their]
    table = text_tables.Table("", heads, rows)
    return f"{text_tables.markdown([table])}\n\nMeasured on {benchmark.conditions(record)}."


def profile(before: str, after: str) -> str:
    """Returns the share of the device time of each part of the work, in two measurements."""
    profiles = [load(name)["profiles"] for name in (after, before)]
    workloads = list(profiles[0])
    parts = dict.fromkeys(part for p in profiles[0].values() for part in p["parts"])

    def share(profiled: Mapping[str, Any], part: str) -> str:
        percent = 100 * profiled["parts"].get(part, 0.0) / profiled["device_seconds"]
        return f"{percent:.0f} %"

    pairs = [p[name] for name in workloads for p in profiles]
    heads = [head for name in workloads for head in (name, "before")]
    rows = [[part, *(share(profiled, part) for profiled in pairs)] for part in parts]
    return text_table(heads, rows)
