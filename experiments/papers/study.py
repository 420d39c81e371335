"""Command line, runs, means over seeds and output files of all studies."""

import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments import overrides
from experiments.papers import setting_checks
from experiments.papers.table import accuracy, readable
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.cli.configs import define_data_dir
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables
from fedjax_pfl.report.text_tables import Table
from fedjax_pfl.runs import runner
from fedjax_pfl.settings.configuration import suggestion
from fedjax_pfl.simulation.devices import prepare_devices
from fedjax_pfl.simulation.summaries import mean_std as mean_std

OUT = flags.DEFINE_string("out", "runs/studies", "Folder for runs, pictures and numbers.")
DATASET = flags.DEFINE_string("dataset", "digits", "Dataset; digits is embedded.")
ROUNDS = flags.DEFINE_integer(
    "rounds", 60, "Rounds of each run; some studies have another default.", lower_bound=2
)
PAPER = flags.DEFINE_bool(
    "paper",
    False,
    "Dataset, clients, rounds, seeds, values and methods as in the paper, except those that are "
    "given: hours or days.",
)
CLIENTS = flags.DEFINE_integer(
    "clients", 10, "Number of clients, where a study does not fix it.", lower_bound=1
)
METHODS = flags.DEFINE_list("methods", [], "Methods of a study that compares some. Default: all.")
SEEDS = flags.DEFINE_integer("seeds", 1, "Number of seeds 0, 1, ...", lower_bound=1)
SET = flags.DEFINE_multi_string("set", [], overrides.HELP)
DATA_DIR = define_data_dir(flags.FLAGS)

_COLUMNS = 5  # most columns of a printed table
_LISTED = 4  # most numbers in a cell
_OWN_SETTINGS = ("algorithm", "sweep", "own_partitions")  # settings that every study chooses
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # safe for the colour-blind
Study = Callable[[], tuple[dict[str, Any], Figure | None]]


class StudyOptions(NamedTuple):
    """Rounds of a study, what else --paper sets, its flags, and settings that --set cannot change.

    `flags` are those that the study reads and others do not: clients, methods, and flags that its
    system defines. They are refused where a study does not read them.
    """

    rounds: int  # as many as take minutes on two cores
    paper_rounds: int  # rounds of the paper
    flags: Collection[str] = ()
    # With --paper, unless the command line sets them. None leaves the flag's default.
    dataset: str | None = None
    clients: int | None = None
    seeds: int | None = None
    # Names and patterns of settings that the study varies, or that its labels and numbers need.
    own_settings: Collection[str] = ()


def run(
    config: ConfigDict, name: str, seed: int, rounds: int | None = None, **components: Any
) -> runner.Result:
    """Returns a run in a directory of --out; reads it if it exists.

    The seed, the rounds (default: --rounds) and the data directory of `config` are replaced.
    `components` are user-defined ones, as for `runner.run`.
    """
    config.update(seed=seed, rounds=rounds or ROUNDS.value, data_dir=DATA_DIR.value)
    overrides.override(config, SET.value)
    setting_checks.require_accuracy(config)
    if "dataset" not in components:
        setting_checks.require_classes_of(config)
    path = _file_name([name, DATASET.value, f"r{ROUNDS.value}", *SET.value, f"s{seed}"])
    print(f"{path} ...", flush=True)
    return runner.run(config, Path(OUT.value) / path, **components)


def _file_name(parts: Sequence[str]) -> str:
    label = "-".join(parts)
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)


def runs(
    config: ConfigDict, name: str, rounds: int | None = None, **components: Any
) -> list[runner.Result]:
    """Returns the results of one run per seed, as `run`; by default with the rounds of `config`."""
    return [
        run(config.copy_and_resolve_references(), name, seed, rounds or config.rounds, **components)
        for seed in range(SEEDS.value)
    ]


def accuracies(results: Sequence[runner.Result]) -> dict[str, Any]:
    """Returns mean and deviation over seeds of the accuracy before and after local training."""
    return {when: mean_std([accuracy(r, when) for r in results]) for when in ("before", "after")}


def scope(short: Any, paper: Any) -> Any:
    """Returns `paper` with --paper, else `short`."""
    return paper if PAPER.value else short


def value_of(flag: flags.FlagHolder[Any], short: Any, paper: Any) -> Any:
    """Returns a flag's value. Its default becomes `paper` with --paper, else `short`."""
    flags.set_default(flag, scope(short, paper))
    return flag.value or flag.default


def refuse_flag(name: str, study: str, when: str = "") -> None:
    """Raises UsageError if the command line has a flag that the study does not read."""
    if flags.FLAGS[name].present:
        place = " ".join(filter(None, [f"the study {study}", when]))
        raise UsageError(f"--{name} has no effect on {place}; leave it out")


def select_methods(rows: Collection[str], short: Sequence[str] = ()) -> list[str]:
    """Returns the methods of --methods. Default: `short`, or with --paper all rows."""
    if unknown := set(METHODS.value) - set(rows):
        raise UsageError(f"this study has no method {', '.join(sorted(unknown))}")
    return value_of(METHODS, list(short or rows), list(rows))


def bars(rows: Mapping[str, Mapping[str, Any]], label: str = "accuracy (%)") -> Figure:
    """Draws groups of bars with whiskers from {row: {series: mean and deviation}}."""
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    figure = Figure(figsize=(max(4.5, 1.1 * len(rows)), 3.6), layout="constrained")
    axis, width = figure.subplots(), 0.8 / len(series)
    for k, (name, colour) in enumerate(zip(series, COLOURS, strict=False)):
        values = [(i, row[name]) for i, row in enumerate(rows.values()) if name in row]
        places = [i + (k - (len(series) - 1) / 2) * width for i, _ in values]
        heights = [value["mean"] for _, value in values]
        spread = [value["std"] for _, value in values]
        whiskers = None if None in spread else spread  # one seed has no deviation
        bars = axis.bar(places, heights, width, yerr=whiskers, capsize=3, color=colour, label=name)
        axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    rotation: dict[str, Any] = {"rotation": 30, "ha": "right"} if len(rows) > 4 else {}
    axis.set_xticks(range(len(rows)), list(rows), **rotation)
    axis.set_ylabel(label)
    axis.margins(y=0.1)
    if len(series) > 1:
        figure.legend(frameon=False, ncols=len(series), loc="outside upper center")
    return figure


def main(
    studies: Mapping[str, Study],
    about: str,
    argv: Sequence[str],
    paper: str,
    options: Mapping[str, StudyOptions],
) -> None:
    """Runs the named study, writes NAME-DATASET.json and .png, and prints the numbers.

    The names of the files also have --set, and the flags of `StudyOptions` whose values are not the
    defaults. Prints `about` if no study is named. Numbers that the `paper` publishes of the same
    figure are printed too. `options` are by study; those under "" are for all other studies.
    """
    if len(argv) < 2:
        print(about.strip())
        return
    if len(argv) > 2:
        raise UsageError(f"name one study; {argv[2]!r} is one word too many")
    if argv[1] not in studies:
        raise UsageError(f"there is no study {argv[1]!r}{suggestion(argv[1], studies)}")
    own_options = options[argv[1] if argv[1] in options else ""]
    flags_of_some = {"clients", "methods"}.union(*(o.flags for o in options.values()))
    for name in sorted(flags_of_some.difference(own_options.flags)):
        refuse_flag(name, argv[1])
    flags.set_default(ROUNDS, scope(own_options.rounds, own_options.paper_rounds))
    if PAPER.value:
        values = (own_options.dataset, own_options.clients, own_options.seeds)
        for flag, value in zip((DATASET, CLIENTS, SEEDS), values, strict=True):
            if value is not None:
                flags.set_default(flag, value)
    _refuse_changes(argv[1], own_options)
    out = Path(OUT.value)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out={out} cannot be written ({error.strerror})") from None
    numbers, figure = studies[argv[1]]()
    if stated := readable(paper, argv[1]):
        numbers["published"] = stated
    own_flags = sorted(own_options.flags)
    stem = _file_name([argv[1], DATASET.value, *_changed_flags(*own_flags), *SET.value])
    facts = {
        "study": argv[1],
        "dataset": DATASET.value,
        "rounds": ROUNDS.value,
        "seeds": SEEDS.value,
        "paper": PAPER.value,
        "set": SET.value,
        **{name: flags.FLAGS[name].value for name in own_flags},
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {jax.default_backend()}",
        "versions": {name: metadata.version(name) for name in ("jax", "flax", "optax")},
        **numbers,
    }
    (out / f"{stem}.json").write_text(json.dumps(facts, indent=2) + "\n")
    if figure is not None:
        figure.savefig(out / f"{stem}.png", dpi=110, bbox_inches="tight")
    print(text_tables.text(as_tables(numbers)))
    print(f"\n{out / stem}.json" + ("" if figure is None else f", {stem}.png"))


def _changed_flags(*names: str) -> Iterator[str]:
    """Yields NAME=VALUE of each flag whose value is not its default."""
    for name in names:
        flag = flags.FLAGS[name]
        if flag.value != flag.default:
            yield f"{name}={'-'.join(flag.value) if isinstance(flag.value, list) else flag.value}"


def _refuse_changes(study: str, own_options: StudyOptions) -> None:
    """Raises UsageError for a value of --set that the study cannot run with or would not show."""
    for change in SET.value:
        key = change.partition("=")[0]
        if key in ("rounds", "dataset", "seeds", *own_options.flags):
            raise UsageError(
                f"--set={change} would not be in the names and labels of the results; give "
                f"--{change}"
            )
        if SEEDS.value > 1 and key == "seed":
            raise UsageError(
                f"--set={change} gives all {SEEDS.value} runs one seed; leave it out, or give "
                "--seeds=1"
            )
    own_settings = (*_OWN_SETTINGS, *own_options.own_settings)
    setting_checks.refuse_own_settings(SET.value, own_settings, study)


def as_tables(numbers: Mapping[str, Any]) -> list[Table]:
    """Returns a study's numbers as tables; groups with the same names share a table."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for path, cells in _rows(numbers, ()):
        if len(cells) <= _COLUMNS:
            row = [" / ".join(path) or "all", *cells.values()]
            tables.setdefault(tuple(cells), []).append(row)
        else:
            rows = [[" / ".join((*path, name)), cell] for name, cell in cells.items()]
            tables.setdefault(("value",), []).extend(rows)
    return [Table("", list(heads), rows) for heads, rows in tables.items()]


def _rows(
    numbers: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yields the numbers of each group, then the groups inside it."""
    groups = {  # a mean with its deviation is not a group
        name: v
        for name, v in numbers.items()
        if isinstance(v, Mapping) and not isinstance(v.get("mean"), int | float)
    }
    cells = {str(name): _cell(value) for name, value in numbers.items() if name not in groups}
    if cells:
        yield path, cells
    for name, group in groups.items():
        yield from _rows(group, (*path, str(name)))


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        mean, std = value["mean"], value.get("std")
        return f"{mean:.4g}" if std is None else f"{mean:.4g} ± {std:.2g}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        if len(value) > _LISTED or any(isinstance(v, list | tuple | Mapping) for v in value):
            return f"{len(value)} values, in the file"
        return ", ".join(map(_cell, value))
    return "–" if value is None else str(value)


def launch(
    studies: Mapping[str, Study], about: str | None, paper: str, options: Mapping[str, StudyOptions]
) -> None:
    """Runs the command line of a paper's studies; `about` is their module's docstring."""
    prepare_devices()
    run_script(lambda argv: main(studies, about or "", argv, paper, options), about)
