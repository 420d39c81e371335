"""Records finished runs of published cells in experiments/results: numbers, curves, pictures.

cells.json has a cell's numbers by seed, TABLE-full.json its curves, and TABLE-full.png a picture of
them. gaps-PAPER.png shows our numbers next to the published ones.
A run belongs to a cell if it has the published settings, except for rounds, evaluations, and the
seeds of the run and its partition. A new run replaces the recorded one with the same seed unless it
is shorter. Evaluations with outputs that are not finite, and runs that end so, are left out. A
cell's accuracies are those at the last round at which three seeds were evaluated, or as many as
there are. Of other measures only the final value is known, so the longest runs count.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.papers import gaps, picture
from experiments.papers.agreement import CELLS, SEEDS, load
from experiments.papers.picture import Curves
from experiments.papers.table import Cell, Table, accuracy, after, cells_of, has_diverged, moved
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.report.comparison import result_settings
from fedjax_pfl.settings import configuration

FREE = ("rounds", "eval_every", "partition_seed")
STAGES = {accuracy: "before", after: "after"}  # the curve that has a measure at every evaluation
Cells = dict[tuple[str, str, str], dict[str, Any]]  # by table, row and column


class CellRuns(NamedTuple):
    """A cell, its longest run for each seed, and the published length."""

    cell: Cell
    runs: Mapping[int, run_reader.Run]
    published_rounds: int


def find(table: Table, folder: Path) -> list[CellRuns]:
    """Returns the cells with finished runs in a folder, none of them longer than published.

    If several runs have the same seed, the run whose partition has that seed too is used.
    """
    defaults = run_reader.default_settings()
    runs: dict[str, list[run_reader.Run]] = {}
    for run in _finished_runs(folder):
        runs.setdefault(_key(run.config, defaults), []).append(run)
    cell_runs = []
    for cell in cells_of(table):
        config = _published_settings(table, cell)
        settings = run_reader.as_json(configuration.resolve(config))
        published = published_rounds(table, cell)
        by_seed: dict[int, run_reader.Run] = {}
        for run in sorted(runs.get(_key(settings, defaults), []), key=_preference):
            if _end(run) <= published:
                by_seed[run.seed] = run
        if by_seed:
            cell_runs.append(CellRuns(cell, by_seed, published))
    return cell_runs


def published_rounds(table: Table, cell: Cell) -> int:
    """Returns the rounds of all phases in the published settings of a cell."""
    return sum(phase.rounds for phase in configuration.phases(_published_settings(table, cell)))


def _published_settings(table: Table, cell: Cell) -> ConfigDict:
    return table.settings(cell.row, cell.column, table.dataset(cell.column), None)


def _end(run: run_reader.Run) -> int:
    return run.metrics[-1]["round"]


def _preference(run: run_reader.Run) -> tuple[int, bool]:
    return _end(run), run.config.get("partition_seed", 0) == run.seed


def _finished_runs(folder: Path) -> Iterator[run_reader.Run]:
    for path in sorted(folder.rglob(run_reader.REPORT)):
        with contextlib.suppress(UsageError):  # damaged, or a page of something else
            yield run_reader.read(path.parent)


def _key(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Returns a text that is equal for runs of one cell."""
    settings = {k: v for k, v in result_settings(config, defaults).items() if k not in FREE}
    phases = [{k: v for k, v in phase.items() if k not in FREE} for phase in settings["phases"]]
    return json.dumps(settings | {"phases": phases}, sort_keys=True)


def record(tables: Mapping[str, Table], folder: Path, results: Path) -> list[str]:
    """Records all finished runs of `folder` in `results` and returns a line for each cell."""
    runs_by_table = {name: find(table, folder) for name, table in tables.items()}
    if not any(runs_by_table.values()):
        raise UsageError(f"{folder} has no finished run of a published cell; see --scale=full")
    content = load(results)
    cells = {(c["table"], c["row"], c["column"]): c for c in content["cells"]}
    order = [(name, c.row, c.column) for name, table in tables.items() for c in cells_of(table)]
    messages: list[str] = []
    try:
        for name, cell_runs in runs_by_table.items():
            if cell_runs:
                messages += _record_table(name, tables[name], cell_runs, cells, results)
        content["cells"] = [cells[place] for place in order if place in cells]
        (results / CELLS).write_text(_as_text("cells", content), encoding="utf-8")
        recorded = [name for name, cell_runs in runs_by_table.items() if cell_runs]
        for paper in dict.fromkeys(name.partition("/")[0] for name in recorded):
            if columns := gaps.columns_of(results, tables, paper):
                figure = gaps.picture(columns, paper)
                figure.savefig(results / f"gaps-{paper}.png", dpi=110)
    except OSError as error:
        raise UsageError(f"{results} cannot be written ({error.strerror})") from None
    return messages


def _record_table(
    name: str, table: Table, cell_runs: Sequence[CellRuns], cells: Cells, results: Path
) -> Iterator[str]:
    """Writes curves and picture of a table, updates `cells`, and yields a line for each cell."""
    path = results / f"{name.replace('/', '-')}-full.json"
    curves: Curves = json.loads(path.read_text("utf-8"))["curves"] if path.is_file() else {}
    for cell_run in cell_runs:
        place = (name, cell_run.cell.row, cell_run.cell.column)
        label = "/".join(place[1:])
        old = curves.get(label, {})
        diverged = [str(s) for s, run in cell_run.runs.items() if has_diverged(run.metrics[-1])]
        new = {
            str(seed): run
            for seed, run in cell_run.runs.items()
            if str(seed) not in diverged
            and (str(seed) not in old or _end(run) >= old[str(seed)]["round"][-1])
        }
        by_seed = _by_seed(old | {seed: _curve(run) for seed, run in new.items()})
        entry = cells.get(place, {"rounds": 0})
        measures = filter(None, table.measures(cell_run.cell.column))
        if any(measure not in STAGES for measure in measures):
            ends = {seed: curve["round"][-1] for seed, curve in by_seed.items()}
            longest = max([entry["rounds"], *ends.values()])
            by_seed = {seed: curve for seed, curve in by_seed.items() if ends[seed] == longest}
            new = {seed: run for seed, run in new.items() if ends[seed] == longest}
        if not new:
            has_number = len(diverged) < len(cell_run.runs)
            why = "longer runs are recorded" if has_number else "it diverged"
            yield f"{name} {label}: left out, {why}"
            continue
        curves[label] = by_seed
        entry = _cell_entry(table, place, by_seed, new, entry)
        cells[place] = entry | {"published_rounds": cell_run.published_rounds}
        remark = f"; left out: seeds {', '.join(diverged)}, which diverged" if diverged else ""
        seeds = ", ".join(entry["measured"])
        yield f"{name} {label}: {entry['rounds']} rounds, seeds {seeds}{remark}"
    about = (
        f"{table.about}; {table.measured}. Curves are accuracy in per cent, a mean over clients."
    )
    path.write_text(_as_text("curves", {"about": about, "curves": curves}), encoding="utf-8")
    if (figure := picture.picture(name, table, curves)) is not None:
        figure.savefig(path.with_suffix(".png"), dpi=110)


def _cell_entry(
    table: Table,
    place: tuple[str, str, str],
    by_seed: Mapping[str, Any],
    new: Mapping[str, run_reader.Run],
    old: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a cell's entry.

    Args:
      table: The cell's table.
      place: Name of the table, row and column.
      by_seed: Curves by seed.
      new: The runs of some of these curves.
      old: The recorded entry, or one of 0 rounds.
    """
    rounds = _common_round([curve["round"] for curve in by_seed.values()])
    counted = {seed: curve for seed, curve in by_seed.items() if rounds in curve["round"]}
    entry: dict[str, Any] = dict(zip(("table", "row", "column"), place, strict=True))
    for key, measure in zip(("measured", "second"), table.measures(place[2]), strict=True):
        if measure in STAGES:
            entry[key] = {
                seed: curve[STAGES[measure]][curve["round"].index(rounds)]
                for seed, curve in counted.items()
            }
        elif measure:
            values = {seed: round(measure(run), 2) for seed, run in new.items()}
            recorded = old.get(key, {}) if old["rounds"] == rounds else {}
            entry[key] = _by_seed(recorded | values)
    partitions = {seed: run.config.get("partition_seed", 0) for seed, run in new.items()}
    partitions = old.get("partition_seeds", {}) | partitions
    # Also of seeds that do not count yet, because they may in a later call.
    entry["partition_seeds"] = {seed: partitions[seed] for seed in by_seed}
    return entry | {"rounds": rounds}


def _common_round(evaluated: Sequence[Sequence[int]]) -> int:
    """Returns the last round at which the most seeds were evaluated; three count as most."""
    seeds = Counter(number for rounds in evaluated for number in rounds)
    return max(seeds, key=lambda number: (min(seeds[number], SEEDS), number))


def _by_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(values.items(), key=lambda item: int(item[0])))


def _curve(run: run_reader.Run) -> dict[str, Any]:
    """Returns a run's numbers at evaluations with finite outputs, None if missing, and totals."""
    lines = [line for line in run.metrics if not has_diverged(line)]
    curve: dict[str, Any] = {
        key: run.provenance.get(key, "unknown") for key in ("commit", "versions")
    }
    curve["round"] = [line["round"] for line in lines]
    for stage in run_reader.STAGES:
        if all(line.get(stage) for line in lines):
            curve[stage] = [round(100 * line[stage]["accuracy_mean"], 2) for line in lines]
    observed = [line.get("diagnostics") or {} for line in lines]
    for name, last in observed[-1].items():
        values = [line.get(name) for line in observed]
        if isinstance(last, Mapping):
            curve[name] = {layer: [v and round(v[layer], 3) for v in values] for layer in last}
        else:
            curve[name] = [None if value is None else round(value, 4) for value in values]
    curve["best_round"] = lines[-1].get("best_round")
    return curve | {"megabytes": round(moved(run) / 1e6, 1)}


def _as_text(key: str, content: Mapping[str, Any]) -> str:
    """Returns JSON with a line for each item under `key`, which is the last one."""
    items = content[key]
    if isinstance(items, list):
        brackets, rows = "[]", [json.dumps(value) for value in items]
    else:
        brackets = "{}"
        rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in items.items()]
    head = json.dumps({k: v for k, v in content.items() if k != key})[:-1]
    body = ",\n  ".join(rows)
    return f"{head},\n {json.dumps(key)}: {brackets[0]}\n  {body}\n {brackets[1]}}}\n"
