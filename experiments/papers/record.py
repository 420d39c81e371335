"""Finished runs of published cells, kept in experiments/results: numbers, curves and a picture.

cells.json gets a cell's numbers by seed; TABLE-full.json every curve, and TABLE-full.png draws it.
A run is one of a cell where it has the published settings but for its length, how often it is
evaluated and the seed. A longer run takes the place of shorter ones; seeds of one length add up.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.papers.agreement import CELLS, load
from experiments.papers.table import Cell, Table, accuracy, after, best, cells_of, mean_of, moved
from fedjax_pfl.config import configuration
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import drawing, run_reader
from fedjax_pfl.report.comparison import common

FREE = ("rounds", "eval_every")
DRAWN = (accuracy, after, best)  # measures that are points of the curves
Curves = dict[str, dict[str, Any]]  # by "row/column" and seed
Cells = dict[tuple[str, str, str], dict[str, Any]]  # by table, row and column


class Found(NamedTuple):
    """A cell, its longest runs, by seed, and the length that is published."""

    cell: Cell
    runs: Mapping[int, run_reader.Run]
    rounds: int
    published_rounds: int


def find(table: Table, folder: Path) -> list[Found]:
    """The cells of a table of which a folder has finished runs, none longer than published."""
    defaults = run_reader.known_settings()
    runs: dict[str, dict[int, dict[int, run_reader.Run]]] = {}
    for run in _finished(folder):
        lengths = runs.setdefault(_key(run.config, defaults), {})
        lengths.setdefault(run.metrics[-1]["round"], {})[run.seed] = run
    found = []
    for cell in cells_of(table):
        config = table.settings(cell.row, cell.column, table.dataset(cell.column), None)
        plain = run_reader.as_read(configuration.resolved(config))
        there = runs.get(_key(plain, defaults), {})
        published = sum(phase.rounds for phase in configuration.phases(config))
        longest = max((rounds for rounds in there if rounds <= published), default=0)
        if longest:
            found.append(Found(cell, there[longest], longest, published))
    return found


def _finished(folder: Path) -> Iterator[run_reader.Run]:
    for path in sorted(folder.rglob(run_reader.REPORT)):
        try:
            yield run_reader.read(path.parent)
        except UsageError:
            continue  # damaged, or a page of something else


def _key(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    whole = common(config, defaults)
    kept = {key: value for key, value in whole.items() if key not in FREE}
    phases = [{k: v for k, v in one.items() if k not in FREE} for one in kept["phases"]]
    return json.dumps(kept | {"phases": phases}, sort_keys=True)


def record(tables: Mapping[str, Table], folder: Path, results: Path) -> list[str]:
    """Keep all that has finished in a folder; a line for each cell."""
    found = {name: find(table, folder) for name, table in tables.items()}
    if not any(found.values()):
        raise UsageError(f"{folder} has no finished run of a published cell; see --scale=full")
    kept = load(results)
    cells = {(c["table"], c["row"], c["column"]): c for c in kept["cells"]}
    said: list[str] = []
    for name, own in found.items():
        if own:
            said += _record(name, tables[name], own, cells, results)
    order = [(name, c.row, c.column) for name, table in tables.items() for c in cells_of(table)]
    kept["cells"] = [cells[place] for place in order if place in cells]
    (results / CELLS).write_text(_lines("cells", kept), encoding="utf-8")
    return said


def _record(
    name: str, table: Table, found: Sequence[Found], cells: Cells, results: Path
) -> Iterator[str]:
    path = results / f"{name.replace('/', '-')}-full.json"
    curves: Curves = json.loads(path.read_text("utf-8"))["curves"] if path.is_file() else {}
    for one in found:
        place = (name, one.cell.row, one.cell.column)
        label = "/".join(place[1:])
        there = cells.get(place, {"rounds": 0})
        if there["rounds"] > one.rounds:
            yield f"{name} {label}: left out, {there['rounds']} rounds are there"
            continue
        if there["rounds"] < one.rounds:
            there = {}
            curves.pop(label, None)
        cells[place] = _numbers(table, place, one, there)
        own = {str(seed): _curve(run) for seed, run in one.runs.items()}
        curves[label] = _by_seed(curves.get(label, {}) | own)
        yield f"{name} {label}: {one.rounds} rounds, seeds {', '.join(cells[place]['ours'])}"
    about = f"{table.about}; {table.ours}. Curves are accuracy in per cent, a mean over clients."
    path.write_text(_lines("curves", {"about": about, "curves": curves}), encoding="utf-8")
    draw(name, table, curves, path.with_suffix(".png"))


def _numbers(
    table: Table, place: tuple[str, str, str], one: Found, there: Mapping[str, Any]
) -> dict[str, Any]:
    made: dict[str, Any] = dict(zip(("table", "row", "column"), place, strict=True))
    for key, measure in zip(("ours", "beside"), table.measures(one.cell.column), strict=True):
        if measure:
            own = {str(seed): round(measure(run), 2) for seed, run in one.runs.items()}
            made[key] = _by_seed(there.get(key, {}) | own)
    return made | {"rounds": one.rounds, "published_rounds": one.published_rounds}


def _by_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(values.items(), key=lambda item: int(item[0])))


def _curve(run: run_reader.Run) -> dict[str, Any]:
    """What a run brought at each evaluation, and what is said of it as a whole."""
    lines = run.metrics
    curve: dict[str, Any] = {key: run.made.get(key, "unknown") for key in ("commit", "versions")}
    curve["round"] = [line["round"] for line in lines]
    for stage in run_reader.STAGES:
        if all(line.get(stage) for line in lines):
            curve[stage] = [round(100 * line[stage]["accuracy_mean"], 2) for line in lines]
    seen = [line.get("observed") or {} for line in lines]
    for word, value in seen[0].items():
        if isinstance(value, Mapping):
            curve[word] = {name: [round(one[word][name], 3) for one in seen] for name in value}
        else:
            curve[word] = [round(one[word], 4) for one in seen]
    whole = {"best_round": lines[-1].get("best_round"), "megabytes": round(moved(run) / 1e6, 1)}
    return curve | whole


def _lines(key: str, whole: Mapping[str, Any]) -> str:
    """JSON with a line for each of what stands under the key, the last one."""
    each = whole[key]
    listed = isinstance(each, list)
    rows = [json.dumps(v) if listed else f"{json.dumps(k)}: {json.dumps(v)}"
            for k, v in (enumerate(each) if listed else each.items())]  # fmt: skip
    head = json.dumps({k: v for k, v in whole.items() if k != key})[:-1]
    begin, end = "[]" if listed else "{}"
    body = ",\n  ".join(rows)
    return f"{head},\n {json.dumps(key)}: {begin}\n  {body}\n {end}}}\n"


def draw(name: str, table: Table, curves: Curves, path: Path) -> None:
    """Accuracy over rounds, a panel for each column; the published number stands at the right.

    Nothing is drawn of a column whose measure is no point of a curve.
    """
    there = [label.split("/") for label in curves]
    columns = [
        c for c in table.columns
        if c in {column for _, column in there} and table.measures(c)[0] in DRAWN
    ]  # fmt: skip
    if not columns:
        return
    rows = [row for row in table.cells if row in {row for row, _ in there}]
    sheet = drawing.sheet(f"{name}: lines are ours, points the published numbers",
                          max(drawing.WIDTH, 3.7 * len(columns)), 4.2)  # fmt: skip
    panels = sheet.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    heights: list[float] = []
    for axes, column in zip(panels, columns, strict=True):
        drawing.dressed(axes).set(title=column, xlabel="round")
        for i, row in enumerate(rows):
            if own := curves.get(f"{row}/{column}"):
                heights += _line(axes, table, row, own, _colour(i))
        heights += _published(axes, table, column, rows)
    low, high = min(heights), max(heights)
    span = max(high - low, 4)
    panels[0].set(ylabel="accuracy (%)", ylim=(low - span, high + span / 10))
    handles = {h.get_label(): h for axes in panels for h in axes.get_legend_handles_labels()[0]}
    sheet.legend(handles.values(), handles.keys(), loc="outside lower center",
                 ncols=min(len(handles), 6), frameon=False, fontsize=9)  # fmt: skip
    sheet.savefig(path, dpi=110)


def _colour(row: int) -> str:
    return drawing.COLOURS[row % len(drawing.COLOURS)]


def _line(
    axes: Axes, table: Table, row: str, own: Mapping[str, Any], colour: str
) -> Sequence[float]:
    """The mean over seeds, and where they all lie; the heights of its second half."""
    each = [dict(zip(one["round"], one[table.reported], strict=True)) for one in own.values()]
    rounds = sorted(set.intersection(*map(set, each)))
    values = np.array([[curve[r] for r in rounds] for curve in each])
    axes.plot(rounds, values.mean(0), color=colour, label=row, linewidth=1.4)
    axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    return values[:, len(rounds) // 2 :].ravel().tolist()


def _published(axes: Axes, table: Table, column: str, rows: Sequence[str]) -> list[float]:
    """Side by side behind the end of the curves; their heights."""
    end, heights = axes.get_xlim()[1], list[float]()
    for i, row in enumerate(rows):
        value = table.cells[row].get(column)
        if value is None:
            continue
        mean, std = mean_of(value), 0.0 if isinstance(value, int | float) else value[1]
        axes.errorbar(end * (1 + 0.03 * i), mean, std, fmt="o", markersize=4, color=_colour(i),
                      capsize=2, linewidth=1)  # fmt: skip
        heights += [mean - std, mean + std]
    return heights
