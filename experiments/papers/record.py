"""Keeps finished runs of published cells in experiments/results: numbers, curves, a picture.

cells.json gets a cell's numbers by seed, TABLE-full.json every curve, and TABLE-full.png draws it.
A run belongs to a cell if it has the published settings, except for its rounds, its evaluations,
its seed and the seed of its partition. A longer run replaces shorter ones; seeds of one length add
up, and a newer run replaces an older one with the same seed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers import picture
from experiments.papers.agreement import CELLS, load
from experiments.papers.picture import Curves
from experiments.papers.table import Cell, Table, cells_of, moved
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.report.comparison import result_settings
from fedjax_pfl.settings import configuration

FREE = ("rounds", "eval_every", "partition_seed")
Cells = dict[tuple[str, str, str], dict[str, Any]]  # by table, row and column


class CellRuns(NamedTuple):
    """A cell, its longest runs by seed, their length, and the published length."""

    cell: Cell
    runs: Mapping[int, run_reader.Run]
    rounds: int
    published_rounds: int


def find(table: Table, folder: Path) -> list[CellRuns]:
    """Returns the cells with finished runs in a folder, none of them longer than published.

    Of runs of one seed, one whose partition has the same seed is preferred.
    """
    defaults = run_reader.default_settings()
    runs: dict[str, dict[int, dict[int, run_reader.Run]]] = {}
    for run in _finished(folder):
        lengths = runs.setdefault(_key(run.config, defaults), {})
        by_seed = lengths.setdefault(run.metrics[-1]["round"], {})
        if run.seed not in by_seed or run.config.get("partition_seed", 0) == run.seed:
            by_seed[run.seed] = run
    found = []
    for cell in cells_of(table):
        config = table.settings(cell.row, cell.column, table.dataset(cell.column), None)
        plain = run_reader.as_json(configuration.resolve(config))
        lengths = runs.get(_key(plain, defaults), {})
        published = sum(phase.rounds for phase in configuration.phases(config))
        longest = max((rounds for rounds in lengths if rounds <= published), default=0)
        if longest:
            found.append(CellRuns(cell, lengths[longest], longest, published))
    return found


def _finished(folder: Path) -> Iterator[run_reader.Run]:
    for path in sorted(folder.rglob(run_reader.REPORT)):
        try:
            yield run_reader.read(path.parent)
        except UsageError:
            continue  # damaged, or a page of something else


def _key(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    whole = result_settings(config, defaults)
    kept = {key: value for key, value in whole.items() if key not in FREE}
    phases = [{k: v for k, v in phase.items() if k not in FREE} for phase in kept["phases"]]
    return json.dumps(kept | {"phases": phases}, sort_keys=True)


def record(tables: Mapping[str, Table], folder: Path, results: Path) -> list[str]:
    """Records all finished runs of a folder and returns a line for each cell."""
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
    name: str, table: Table, found: Sequence[CellRuns], cells: Cells, results: Path
) -> Iterator[str]:
    path = results / f"{name.replace('/', '-')}-full.json"
    curves: Curves = json.loads(path.read_text("utf-8"))["curves"] if path.is_file() else {}
    for new in found:
        place = (name, new.cell.row, new.cell.column)
        label = "/".join(place[1:])
        old = cells.get(place, {"rounds": 0})
        if old["rounds"] > new.rounds:
            yield f"{name} {label}: left out, {old['rounds']} rounds are recorded"
            continue
        if old["rounds"] < new.rounds:
            old = {}
            curves.pop(label, None)
        cells[place] = _numbers(table, place, new, old)
        own = {str(seed): _curve(run) for seed, run in new.runs.items()}
        curves[label] = _by_seed(curves.get(label, {}) | own)
        yield f"{name} {label}: {new.rounds} rounds, seeds {', '.join(cells[place]['ours'])}"
    about = f"{table.about}; {table.ours}. Curves are accuracy in per cent, a mean over clients."
    path.write_text(_lines("curves", {"about": about, "curves": curves}), encoding="utf-8")
    if (sheet := picture.picture(name, table, curves)) is not None:
        sheet.savefig(path.with_suffix(".png"), dpi=110)


def _numbers(
    table: Table, place: tuple[str, str, str], new: CellRuns, old: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a cell's entry, with the seeds of its old entry if that has as many rounds."""
    entry: dict[str, Any] = dict(zip(("table", "row", "column"), place, strict=True))
    for key, measure in zip(("ours", "beside"), table.measures(new.cell.column), strict=True):
        if measure:
            own = {str(seed): round(measure(run), 2) for seed, run in new.runs.items()}
            entry[key] = _by_seed(old.get(key, {}) | own)
    partitions = {str(s): run.config.get("partition_seed", 0) for s, run in new.runs.items()}
    entry["partition_seeds"] = _by_seed(old.get("partition_seeds", {}) | partitions)
    return entry | {"rounds": new.rounds, "published_rounds": new.published_rounds}


def _by_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(values.items(), key=lambda item: int(item[0])))


def _curve(run: run_reader.Run) -> dict[str, Any]:
    """Returns a run's numbers at each evaluation, null where there are none, and its totals."""
    lines = run.metrics
    curve: dict[str, Any] = {
        key: run.provenance.get(key, "unknown") for key in ("commit", "versions")
    }
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
    """Returns JSON with a line for each item under the key, which is the last one."""
    each = whole[key]
    listed = isinstance(each, list)
    rows = [json.dumps(v) if listed else f"{json.dumps(k)}: {json.dumps(v)}"
            for k, v in (enumerate(each) if listed else each.items())]  # fmt: skip
    head = json.dumps({k: v for k, v in whole.items() if k != key})[:-1]
    begin, end = "[]" if listed else "{}"
    body = ",\n  ".join(rows)
    return f"{head},\n {json.dumps(key)}: {begin}\n  {body}\n {end}}}\n"
