"""Damaged checkpoints.

Damages the newest checkpoint of a run or all of them, and files of rows of off-device stores. Every
fault must be reported with its file or leaf. The run must resume from the previous checkpoint, bit
for bit; without any, one line must say what to do. Some checkpoints lack the list of digests, like
after a kill; a fault that changes nothing of the restored values is harmless.
"""

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, runner
from fedjax_pfl.runs.build import Experiment, build
from fedjax_pfl.runs.resume import resume
from fedjax_pfl.runs.run_state import Position, SweepRun
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import ledger, stores
from tests.stress.common import CONFIG, Row, copy, digest, one_line, progress, scratch, store_suffix

KINDS = ("bits flipped", "cut off", "overwritten", "emptied", "removed", "put in another's place")


def damage(kind: str, path: Path, rng: np.random.Generator) -> None:
    """Damages a file."""
    content = bytearray(path.read_bytes())
    if kind == "bits flipped":
        for bit in rng.integers(0, len(content) * 8, rng.integers(1, 5)):
            content[bit // 8] ^= 1 << (bit % 8)
    elif kind == "cut off":
        del content[rng.integers(0, len(content)) :]
    elif kind == "overwritten":
        start = rng.integers(0, len(content))
        content[start : start + 64] = bytes(len(content[start : start + 64]))
    elif kind == "emptied":
        content.clear()
    elif kind == "put in another's place":
        files = [p for p in path.parents[1].rglob("*") if p.is_file() and p != path]
        content = bytearray(files[rng.integers(len(files))].read_bytes())
    if kind == "removed":
        path.unlink()
    else:
        path.write_bytes(bytes(content))


class Resumed:
    """A resumed run: the round, the digest of the states, and the messages."""

    def __init__(self, experiment: Experiment, directory: Path) -> None:
        config, stderr = json.loads((directory / "config.json").read_text()), io.StringIO()
        self.round, self.digest, self.error = -1, "", None
        with contextlib.redirect_stderr(stderr):
            store = checkpoints.open_store(directory / "checkpoints")
            start = Position(ledger=ledger.empty(experiment.federation.clients))
            run = SweepRun("", experiment.phases[0].config, config, directory, store, start)
            try:
                state = (resume(experiment, [run]) or [None])[0]
                states = [tree and stores.to_arrays(tree) for tree in (state, run.best)]
                self.round, self.digest = run.at.round, digest(states, run.at.ledger)
            except UsageError as error:
                self.error = str(error)
            store.manager.close()
        self.stderr = stderr.getvalue()


def rot(number: int = 100, seed: int = 0, config: dict[str, Any] = CONFIG) -> list[Row]:
    """Runs `number` faults, each on a fresh copy."""
    rng = np.random.default_rng(seed)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    harmless = fell_back = refused = 0
    with scratch() as folder:
        settings = configuration.complete({**config, "rounds": 4})
        experiment, intact = build(settings), folder / "run"
        runner.run(settings, intact)
        older, newer = sorted(int(p.name) for p in (intact / "checkpoints").iterdir())
        of_older = {path.relative_to(intact) for path in needed(intact, older)}
        new = Resumed(experiment, copy(intact, folder / "new"))
        only = copy(intact, folder / "only")
        checkpoints.open_store(only / "checkpoints").drop(newer)
        old = Resumed(experiment, only)
        assert (old.round, new.round, old.stderr + new.stderr) == (older, newer, "")
        for count in range(number):
            directory = copy(intact, folder / "damaged")
            kind, listed, all_steps = KINDS[rng.integers(6)], rng.random() > 0.2, rng.random() < 0.1
            for step in (newer, older) if all_steps else (newer,):
                if not listed:
                    (directory / "checkpoints" / str(step) / checkpoints.SUMS).unlink()
                files = [p for p in needed(directory, step) if p.stat().st_size]
                path = files[rng.integers(len(files))]
                damage(kind, path, rng)
                all_steps |= path.relative_to(directory) in of_older
            # Without digests of files, bytes that are not read may change.
            changed = contents(directory) != contents(intact, listed)
            result = Resumed(experiment, directory)
            tried[kind] += 1
            progress(f"{count + 1} faults")
            if result.error:
                correct = (
                    all_steps and one_line(result.error) and "delete that folder" in result.error
                )
                refused += correct
            elif result.round == older:
                message = f"checkpoint of round {newer} is damaged: " in result.stderr
                correct = (
                    message and one_line(result.stderr.strip()) and result.digest == old.digest
                )
                fell_back += correct
            else:
                correct = (
                    result.digest == new.digest and not result.stderr and not (listed and changed)
                )
                harmless += correct
            if not correct:
                lost[kind] += 1
                print(f"{kind} (all: {all_steps}, listed: {listed}), round {result.round}:")
                print(result.error, result.stderr)
    note = f"{fell_back} fell back, {refused} refused (none was good), {harmless} harmless"
    rows = [Row(kind, tried[kind], tried[kind] - lost[kind], lost[kind]) for kind in KINDS]
    title = f"checkpoint damaged{store_suffix(config)}"
    total = Row(title, number, number - lost.total(), lost.total(), note)
    return [total, *(row._replace(kind=f"- {row.kind}") for row in rows if row.tried)]


def needed(directory: Path, step: int) -> list[Path]:
    """Returns the files of a checkpoint."""
    files = sorted(p for p in (directory / "checkpoints" / str(step)).rglob("*") if p.is_file())
    store = checkpoints.open_store(directory / "checkpoints", read_only=True)
    rows = store.facts(step).get("rows") or {"files": ()}
    store.manager.close()
    return [*files, *(directory / "rows" / name for name in rows["files"])]


def contents(directory: Path, listed: bool = True) -> dict[str, bytes]:
    """Returns the content of all files of checkpoints, optionally without lists of digests."""

    def files() -> Iterator[Path]:
        for part in ("checkpoints", "rows"):
            yield from (directory / part).rglob("*")

    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in files()
        if p.is_file() and (listed or p.name != checkpoints.SUMS)
    }
