"""Prints a published table with our numbers; runs missing cells and resumes interrupted runs.

python -m experiments.reproduce                                   lists the tables
python -m experiments.reproduce --table=pfedla/table1             minutes on two cores
python -m experiments.reproduce --table=pfedla/table1 --scale=full --cells=cifar10-n10 --seeds=3
python -m experiments.reproduce --table=pfedla/table1 --scale=full --only_show
python -m experiments.reproduce --record --out=runs/full          records finished runs
python -m experiments.reproduce --summary                         counts the cells that agree

--scale=quick takes few rounds and one seed. It uses the embedded digits if a column's data are
missing or its network is too large. --scale=full takes the published settings and three seeds,
each with its own partition. Settings that are not as published are printed below the table. --cells
takes rows and columns, with * for anything: pfedla, cifar10-n10, pfedla/cifar10-n10. Runs in --out
are found by their settings.

In pFedHN's tables --rounds is the number of communication steps. LG-FedAvg gets 1.2 times that
number. Local trains each client for 0.4 times that number of local steps, rounded down to a
multiple of 50, and for at least 50.
"""

import fnmatch
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from experiments import overrides
from experiments.papers import agreement, cell_runs, record, setting_checks
from experiments.papers.cell_runs import Place, Plan
from experiments.papers.table import cell as format_cell
from experiments.papers.table import mean_of, plateau
from experiments.papers.tables import TABLES, Cell, Table, cells_of
from fedjax_pfl import data
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.cli.configs import define_data_dir
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import html_page as report
from fedjax_pfl.report import text_tables
from fedjax_pfl.runs import interrupt
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.listing import wrapped
from fedjax_pfl.simulation.devices import prepare_devices
from fedjax_pfl.simulation.summaries import mean_std

SCALES = {"quick": 1, "full": 3}  # number of seeds
NOT_COMPARED = {"data_dir", "seed", "partition_seed", "eval_every"}  # settings
_SEEDS = "runs have seeds 0, 1, ..., each with its own partition; leave it out and give --seeds=N"
IGNORED = {  # settings that have no effect on a table, with the reason and what to do
    **dict.fromkeys(("seed", "partition_seed", "seeds", "own_partitions"), _SEEDS),
    "sweep": "a cell has one run per seed; leave it out and give its values one at a time",
}
NOT_RUN = "not run"
LEFT_OUT = "left out"


class Options(NamedTuple):
    """Options of the command line."""

    table: str
    scale: str = "quick"
    cells: Sequence[str] = ()
    seeds: int | None = None
    rounds: int | None = None
    out: Path = Path("runs/reproduce")
    data_dir: str | None = None
    changes: Sequence[str] = ()
    only_show: bool = False
    one_program: bool = False
    format: str = "text"


def listing() -> str:
    """Returns a list of all tables."""
    width = max(map(len, TABLES)) + 4
    lines = ["Tables: python -m experiments.reproduce --table=NAME"]
    for name, table in TABLES.items():
        description = f"{table.about}; columns {', '.join(table.columns)}"
        name_column = f"  {name}".ljust(width)
        lines += wrapped(name_column + description, width)
    return "\n".join(lines)


def plans(table: Table, options: Options) -> list[Plan]:
    """Returns a plan for every cell to show."""
    for change in options.changes:
        if reason := IGNORED.get(change.partition("=")[0]):
            raise UsageError(f"--set={change} is ignored: {reason}")
    result = []
    for cell in _select_cells(table, options):
        dataset = table.dataset(cell.column)
        published = table.settings(cell.row, cell.column, dataset, None)
        is_quick = options.scale == "quick"
        if is_quick and not options.cells and cell.column not in table.quick.columns:
            result.append(Plan(cell, published, None, LEFT_OUT))
            continue
        if is_quick:
            config = _quick(table, cell, options)
        else:
            config = table.settings(cell.row, cell.column, dataset, options.rounds)
        config.data_dir, table_dataset = options.data_dir, config.dataset
        overrides.override(config, options.changes)
        setting_checks.require_accuracy(config)
        if table.second in ("before", "after") and not config.evaluate_after:
            raise UsageError(
                f"{options.table} shows accuracy after local training, which evaluate_after=false "
                "leaves out; leave this setting out"
            )
        if remark := table.impossible(config):
            result.append(Plan(cell, published, None, remark))
        elif message := _missing(config.dataset, options.data_dir):
            result.append(Plan(cell, published, config, "no data", message))
        else:
            if config.dataset != table_dataset:  # the tables' own datasets have classes
                setting_checks.require_classes_of(config)
            result.append(Plan(cell, published, config))
    return result


def _select_cells(table: Table, options: Options) -> list[Cell]:
    """Returns the cells that --cells selects; with --scale=quick a row is in quick's columns."""
    all_cells, patterns = cells_of(table), options.cells
    columns = table.columns if options.scale == "full" else table.quick.columns
    names = [
        (cell.column, f"{cell.row}/{cell.column}", *([cell.row] if cell.column in columns else []))
        for cell in all_cells
    ]
    for pattern in patterns:
        if not any(_fits(cell_names, pattern) for cell_names in names):
            valid = [name for cell_names in names for name in cell_names]
            valid += [cell.row for cell in all_cells]
            raise UsageError(f"no cell is {pattern!r}{configuration.suggestion(pattern, valid)}")
    if not patterns:
        return all_cells
    return [
        cell
        for cell, cell_names in zip(all_cells, names, strict=True)
        if any(_fits(cell_names, pattern) for pattern in patterns)
    ]


def _fits(names: Sequence[str], pattern: str) -> bool:
    """Returns True if a pattern fits a name; one without a slash fits no ROW/COLUMN."""
    return any(
        fnmatch.fnmatchcase(name, pattern) for name in names if ("/" in name) == ("/" in pattern)
    )


def _quick(table: Table, cell: Cell, options: Options) -> ConfigDict:
    dataset, quick = table.dataset(cell.column), table.quick
    if dataset in quick.light and not _missing(dataset, options.data_dir):
        rounds = options.rounds or quick.light[dataset]
        config = table.settings(cell.row, cell.column, dataset, rounds)
        quick.shrink(config)
    else:
        config = table.settings(cell.row, cell.column, "digits", options.rounds or quick.rounds)
    # Five evaluations are enough for a curve and for the best validation accuracy.
    config.eval_every = max(1, config.rounds // 5)
    return config


def _missing(dataset: str, data_dir: str | None) -> str:
    """Returns how to get a missing dataset, or nothing if it exists."""
    try:
        data.require_available(dataset, data_dir)
    except UsageError as error:
        return str(error)
    return ""


def tables(table: Table, places: Sequence[Place]) -> list[text_tables.Table]:
    """Returns a table per column: published, ours, gap, seeds and the second measure."""
    result = []
    shown_places = [place for place in places if place.plan.remark != LEFT_OUT]
    for column in dict.fromkeys(place.plan.cell.column for place in shown_places):
        column_places = [place for place in shown_places if place.plan.cell.column == column]
        measure, second_measure = table.measures(column)
        second_head = [table.second] if second_measure else []
        heads = ["published", "ours", "gap", "seeds", *second_head, "remark"]
        rows, variants = list[list[str]](), list[list[str]]()
        for place in column_places:
            runs = [run for run in place.runs.values() if run.finished]
            published = place.plan.cell.published
            cells = ["–" if published is None else format_cell(published), NOT_RUN, "", ""]
            cells += [""] if second_measure else []
            remark = place.plan.remark
            if runs:
                score = mean_std([measure(run) for run in runs])
                cells[1], cells[3] = format_cell(score), str(len(runs))
                if published is not None and _same_data(table, place.plan):
                    gap = score["mean"] - mean_of(published)
                    cells[2] = "" if math.isnan(gap) else f"{gap:+.2f}"
                if second_measure:
                    cells[4] = format_cell(mean_std([second_measure(run) for run in runs]))
                remark = ", ".join(sorted({plateau(run, table.reported) for run in runs}))
            table_rows = variants if place.plan.cell.row in table.variants else rows
            table_rows.append([place.plan.cell.row, *cells, _unfinished(place) or remark])
        result.append(text_tables.Table(caption=column, heads=heads, rows=rows, variants=variants))
    return result


def _same_data(table: Table, plan: Plan) -> bool:
    return plan.config is not None and plan.config.dataset == table.dataset(plan.cell.column)


def _unfinished(place: Place) -> str:
    rounds = {
        seed: run.metrics[-1]["round"] for seed, run in place.runs.items() if not run.finished
    }
    return ", ".join(f"seed {seed} is at round {t}" for seed, t in rounds.items())


def differences(plan: Sequence[Plan]) -> list[str]:
    """Returns the settings that differ from the published ones, with all their values."""
    values: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for item in plan:
        if item.config is None:
            continue
        old, new = (
            dict(report.flatten(configuration.resolve(config)))
            for config in (item.published, item.config)
        )
        for key in old.keys() & new.keys() - NOT_COMPARED:
            if old[key] != new[key]:
                run_values, published = values.setdefault(key, ({}, {}))
                run_values[_in_words(new[key])] = published[_in_words(old[key])] = None
    ordered = sorted(values.items(), key=lambda item: ("." in item[0], item[0]))
    return [f"{key} {' or '.join(a)} instead of {' or '.join(b)}" for key, (a, b) in ordered]


def _in_words(value: str) -> str:
    return "unset" if value == "null" else value


def remarks(options: Options, table: Table, places: Sequence[Place]) -> Iterator[str]:
    """Yields sentences on differences from the paper and on missing runs."""
    plan = [place.plan for place in places]
    runnable = [item for item in plan if item.config is not None]
    if changed := differences(runnable):
        yield f"Not the published settings: {'; '.join(changed)}."
    elif runnable:
        yield "The settings are the published ones, and our choice if the paper is silent."
    if not all(_same_data(table, item) for item in runnable):
        yield "No gap is shown for runs on other data than the column's."
    if columns := dict.fromkeys(item.cell.column for item in plan if item.remark == LEFT_OUT):
        yield (
            f"Left out: {', '.join(columns)}. --cells=... runs some of them, --scale=full all of "
            "them in the published settings."
        )
    blocked = [place.plan for place in places if place.plan.message and not place.runs]
    for message in dict.fromkeys(item.message for item in blocked):
        plans_of_message = [item for item in blocked if item.message == message]
        cells = [f"{item.cell.row}/{item.cell.column}" for item in plans_of_message]
        names = ", ".join(cells) if len(cells) < 4 else f"{len(cells)} cells"
        yield f"{names}: {message}"


def page(options: Options, table: Table, places: Sequence[Place], form: str) -> str:
    """Returns the whole output as text or Markdown."""
    seeds = options.seeds or SCALES[options.scale]
    seed_range = f"seeds 0 to {seeds - 1}" if seeds > 1 else "seed 0"
    head = [
        f"{options.table}. {table.about}.",
        f"Ours, scale {options.scale}, {seed_range}: {table.measured}. Gap: ours minus published. "
        "±: over seeds, each with its own partition.",
    ]
    tail = remarks(options, table, places)
    body = tables(table, places)
    if form == "markdown":
        return "\n\n".join([*head, text_tables.markdown(body), *tail])
    fill = text_tables.fill_paragraph
    return "\n\n".join([*map(fill, head), text_tables.text(body), *map(fill, tail)])


def write(options: Options, table: Table, places: Sequence[Place]) -> None:
    """Writes the page in both formats next to the runs."""
    stem = f"{options.table.replace('/', '-')}-{options.scale}"
    try:
        for form, suffix in (("text", "txt"), ("markdown", "md")):
            path = options.out / f"{stem}.{suffix}"
            path.write_text(page(options, table, places, form) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{options.out} cannot be written ({error.strerror})") from None


def reproduce(options: Options) -> int:
    """Runs, prints and writes a table; returns the exit status."""
    if not options.table:
        print(listing())
        return 0
    if options.table not in TABLES:
        hint = configuration.suggestion(options.table, TABLES)
        raise UsageError(f"there is no table {options.table!r}{hint}")
    table, status = TABLES[options.table], 0
    seeds = options.seeds or SCALES[options.scale]
    plan = plans(table, options)
    if not options.only_show:
        try:
            plan = cell_runs.run(
                options.table, plan, seeds, options.out, one_program=options.one_program
            )
        except interrupt.Stopped as stopped:
            print(stopped, file=sys.stderr)
            status = stopped.code
    places = cell_runs.collect(plan, seeds, options.out)
    if not options.only_show and options.out.is_dir():  # missing if nothing could be run
        write(options, table, places)
    print(page(options, table, places, options.format))
    tried = [place for place in places if place.plan.remark == cell_runs.FAILED]
    if tried and not any(place.runs for place in places):
        raise UsageError(f"no run finished: {tried[0].plan.message}")
    return status


def refuse_ignored(flag_values: flags.FlagValues) -> None:
    """Raises UsageError for a flag that --record or --summary, which have all tables, ignores."""
    of_one_table = {*Options._fields, "set", "record", "summary"} - {"changes", "data_dir"}
    for name, used in (("record", "out"), ("summary", "format")):
        ignored = sorted(
            flag
            for flag in of_one_table - {name, used}
            if not flag_values[flag].using_default_value
        )
        if flag_values[name].value and ignored:
            raise UsageError(f"--{name} is for all tables and cells; leave --{ignored[0]} out")


def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; name a table as --table=NAME")
    flag_values = flags.FLAGS
    refuse_ignored(flag_values)
    if flag_values.record:
        return print("\n".join(record.record(TABLES, Path(flag_values.out), agreement.RESULTS)))
    if flag_values.summary:
        return print(agreement.summary(agreement.RESULTS, TABLES, flag_values.format))
    names = {*Options._fields} - {"out", "changes"}
    options: dict[str, Any] = {name: flag_values[name].value for name in names}
    sys.exit(reproduce(Options(**options, out=Path(flag_values.out), changes=flag_values.set)))


if __name__ == "__main__":
    flags.DEFINE_string("table", "", "The table. Default: list all tables.")
    flags.DEFINE_enum(
        "scale", "quick", list(SCALES), "quick: minutes; full: the published settings."
    )
    flags.DEFINE_list("cells", [], "ROW, COLUMN or ROW/COLUMN, with *. Default: as the scale says.")
    flags.DEFINE_integer("seeds", None, "Seeds 0, 1, ... Default: 1, or 3 in full.", lower_bound=1)
    flags.DEFINE_integer("rounds", None, "Rounds instead of those of the scale.", lower_bound=1)
    flags.DEFINE_string("out", "runs/reproduce", "Folder of the runs and the table's files.")
    flags.DEFINE_multi_string("set", [], overrides.HELP)
    flags.DEFINE_bool("only_show", False, "Print what has been computed and run nothing.")
    flags.DEFINE_bool("one_program", False, "Run the seeds of a cell as one program (GPU, TPU).")
    flags.DEFINE_bool("record", False, "Write numbers and curves of --out to experiments/results.")
    flags.DEFINE_bool("summary", False, "Count the recorded cells that agree.")
    flags.DEFINE_enum("format", "text", ["text", "markdown"], "Format of the output.")
    define_data_dir(flags.FLAGS)
    prepare_devices()
    run_script(main, __doc__)
