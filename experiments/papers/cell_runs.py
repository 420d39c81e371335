"""Runs of the cells of a paper's tables: finds existing ones, runs missing ones."""

import contextlib
import hashlib
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from experiments.papers.table import Cell
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.report.run_index import RunIndex
from fedjax_pfl.runs import interrupt, runner

FAILED = "cannot be run"


class Plan(NamedTuple):
    """A cell and the settings to run it with."""

    cell: Cell
    published: ConfigDict  # the paper's settings
    config: ConfigDict | None  # our settings; None if the cell is impossible or left out
    remark: str = ""  # a few words on why it is not run
    message: str = ""  # what to do about it


class Place(NamedTuple):
    """A cell and its existing runs by seed."""

    plan: Plan
    runs: Mapping[int, run_reader.Run]


def jobs(plan: Sequence[Plan], seeds: int) -> Iterator[tuple[Plan, ConfigDict]]:
    """Yields all runs, seed by seed: every cell has one seed before any cell has two."""
    for seed in range(seeds):
        for item in plan:
            if item.config is not None:
                config = item.config.copy_and_resolve_references()
                config.seed = config.partition_seed = seed
                yield item, config


def collect(plan: Sequence[Plan], seeds: int, folder: Path) -> list[Place]:
    """Returns the existing runs of each cell."""
    index = RunIndex(folder)
    runs: dict[int, dict[int, run_reader.Run]] = {id(item): {} for item in plan}
    for item, config in jobs(plan, seeds):
        if path := index.find(config)[1]:
            with contextlib.suppress(UsageError):  # no evaluation yet
                runs[id(item)][config.seed] = run_reader.read(path)
    return [Place(item, runs[id(item)]) for item in plan]


def run(
    table: str, plan: Sequence[Plan], seeds: int, folder: Path, *, one_program: bool
) -> list[Plan]:
    """Runs missing cells, resumes interrupted runs, and returns the plan with failures marked.

    `table` names new run directories in `folder`. With `one_program`, the seeds of a cell are one
    program if they can be.
    """
    index, failed = RunIndex(folder), dict[str, str]()
    programs: dict[Hashable, dict[str, ConfigDict]] = {}  # runs of each program by directory
    cells: dict[str, list[int]] = {}  # cells of each run
    interrupted = new = 0
    for item, config in jobs([item for item in plan if not item.message], seeds):
        if config.reference or config.reference_runs:
            raise UsageError("Local and FedAvg are rows of the tables; leave reference runs out")
        key, path = index.find(config)
        cells.setdefault(key, []).append(id(item))
        if len(cells[key]) > 1 or (path and (path / "report.html").is_file()):
            continue
        interrupted, new = interrupted + (path is not None), new + (path is None)
        name = str(path.relative_to(folder)) if path else _name(table, item.cell, config.seed, key)
        program_key = (item.cell.row, item.cell.column) if one_program else key
        programs.setdefault(program_key, {})[name] = config
    count = len(cells)
    facts = f"{count - interrupted - new} exist, {interrupted} are resumed, {new} are missing"
    print(f"{count} run{'s' * (count != 1)}: {facts}", file=sys.stderr)
    with interrupt.on_signals() as stop:
        for number, program in enumerate(programs.values(), 1):
            names = ", ".join(str(folder / name) for name in program)
            print(f"[{number}/{len(programs)}] {names}", file=sys.stderr, flush=True)
            try:
                runner.run_configs(program, folder, stop)
            except UsageError as error:
                line = " ".join(str(error).split())
                failed |= {index.find(config)[0]: line for config in program.values()}
                print(f"  {line}", file=sys.stderr)
    messages = {cell: message for key, message in failed.items() for cell in cells[key]}
    return [
        item._replace(remark=FAILED, message=messages[id(item)]) if id(item) in messages else item
        for item in plan
    ]


def _name(table: str, cell: Cell, seed: int, key: str) -> str:
    """Returns a folder name: the cell and seed, and a digest of the settings."""
    label = f"{table}-{cell.row}-{cell.column}-s{seed}".replace("/", "-")
    safe_label = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)
    return f"{safe_label}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
