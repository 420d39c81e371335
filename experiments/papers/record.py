"""Finished runs of published cells, kept in experiments/results: numbers, curves and a picture.

cells.json gets a cell's numbers by seed; TABLE-full.json every curve, and TABLE-full.png draws it.
A run is one of a cell where it has the published settings but for its length, how often it is
evaluated and the seed. A longer run takes the place of shorter ones; seeds of one length add up.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers import picture
from experiments.papers.agreement import CELLS, load
from experiments.papers.picture import Curves
from experiments.papers.table import Cell, Table, cells_of, moved
from fedjax_pfl.config import configuration
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.report.comparison import common

FREE = ("rounds", "eval_every")
Cells = dict[tuple[str, str, str], dict[str, Any]]  # by table, row and column


class Found(NamedTuple):
    """A cell, its longest runs by seed, their length, and the published one."""

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
    order = [(name, c.row, c.column) for name, table in tables.items() for c in cells_of(table)]
    said: list[str] = []
    try:
        for name, own in found.items():
            if own:
                said += _record(name, tables[name], own, cells, results)
        kept["cells"] = [cells[place] for place in order if place in cells]
        (results / CELLS).write_text(_lines("cells", kept), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{results} cannot be written ({error.strerror})") from None
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
    if (sheet := picture.picture(name, table, curves)) is not None:
        sheet.savefig(path.with_suffix(".png"), dpi=110)


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
    """What a run brought at each evaluation, null where nothing; and what is said of the whole."""
    lines = run.metrics
    curve: dict[str, Any] = {key: run.made.get(key, "unknown") for key in ("commit", "versions")}
    curve["round"] = [line["round"] for line in lines]
    for stage in run_reader.STAGES:
        if all(line.get(stage) for line in lines):
            curve[stage] = [round(100 * line[stage]["accuracy_mean"], 2) for line in lines]
    seen = [line.get("observed") or {} for line in lines]
    for word, value in seen[-1].items():
        each = [one.get(word) for one in seen]
        if isinstance(value, Mapping):
            curve[word] = {name: [one and round(one[name], 3) for one in each] for name in value}
        else:
            curve[word] = [None if one is None else round(one, 4) for one in each]
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
