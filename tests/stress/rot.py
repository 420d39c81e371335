"""Damaged checkpoints: python -m tests.stress.rot --faults=100 --store=disk

The newest checkpoint of a run, or all of them, are damaged at random: bits flipped, files cut off,
overwritten, emptied, removed or put in another's place; with the stores host and disk also files of
rows, some of which both checkpoints need. Each has to be noticed, with the file or
the leaf in the warning, and the run has to go on from the one before it, bit for bit; where none
is left, one line has to say what to do. A part of the faults is done to checkpoints without the
list of their files' digests, as a kill just before it leaves them: there the leaves' digests have
to hold, and a fault that changes nothing of what is restored counts as harmless.
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
from tests.stress.common import (
    CONFIG,
    Row,
    copied,
    digest,
    finish,
    given,
    of_store,
    one_line,
    progress,
    scratch,
)

KINDS = ("bits flipped", "cut off", "overwritten", "emptied", "removed", "put in another's place")


def damage(kind: str, path: Path, rng: np.random.Generator) -> None:
    """One fault to a file."""
    content = bytearray(path.read_bytes())
    if kind == "bits flipped":
        for at in rng.integers(0, len(content) * 8, rng.integers(1, 5)):
            content[at // 8] ^= 1 << (at % 8)
    elif kind == "cut off":
        del content[rng.integers(0, len(content)) :]
    elif kind == "overwritten":
        at = rng.integers(0, len(content))
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "emptied":
        content.clear()
    elif kind == "put in another's place":
        others = [p for p in path.parents[1].rglob("*") if p.is_file() and p != path]
        content = bytearray(others[rng.integers(len(others))].read_bytes())
    if kind == "removed":
        path.unlink()
    else:
        path.write_bytes(bytes(content))


class Resumed:
    """What a run's checkpoints are good for: the round, the states, and what is said."""

    def __init__(self, built: Experiment, directory: Path) -> None:
        config, said = json.loads((directory / "config.json").read_text()), io.StringIO()
        self.round, self.digest, self.error = -1, "", None
        with contextlib.redirect_stderr(said):
            store = checkpoints.open_store(directory / "checkpoints")
            start = Position(ledger=ledger.empty(built.federation.clients))
            run = SweepRun("", built.phases[0].config, config, directory, store, start)
            try:
                state = (resume(built, [run]) or [None])[0]
                states = [one and stores.to_arrays(one) for one in (state, run.best)]
                self.round, self.digest = run.at.round, digest(states, run.at.ledger)
            except UsageError as error:
                self.error = str(error)
            store.manager.close()
        self.said = said.getvalue()


def rot(number: int = 100, seed: int = 0, config: dict[str, Any] = CONFIG) -> list[Row]:
    """So many faults, one after the other, each to a fresh copy."""
    rng = np.random.default_rng(seed)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    harmless = fell_back = refused = 0
    with scratch() as place:
        settings = configuration.complete({**config, "rounds": 4})
        built, good = build(settings), place / "run"
        runner.run(settings, good)
        older, newer = sorted(int(p.name) for p in (good / "checkpoints").iterdir())
        of_older = {path.relative_to(good) for path in needed(good, older)}
        new = Resumed(built, copied(good, place / "new"))
        only = copied(good, place / "only")
        checkpoints.open_store(only / "checkpoints").drop(newer)
        old = Resumed(built, only)
        assert (old.round, new.round, old.said + new.said) == (older, newer, "")
        for count in range(number):
            there = copied(good, place / "there")
            kind, listed, both = KINDS[rng.integers(6)], rng.random() > 0.2, rng.random() < 0.1
            for step in (newer, older) if both else (newer,):
                if not listed:
                    (there / "checkpoints" / str(step) / checkpoints.SUMS).unlink()
                files = [p for p in needed(there, step) if p.stat().st_size]
                path = files[rng.integers(len(files))]
                damage(kind, path, rng)
                both |= path.relative_to(there) in of_older
            # Unlisted, a checkpoint cannot know of what nobody reads.
            changed = contents(there) != contents(good, listed)
            got = Resumed(built, there)
            tried[kind] += 1
            progress(f"{count + 1} faults")
            if got.error:
                fine = both and one_line(got.error) and "delete that folder" in got.error
                refused += fine
            elif got.round == older:
                named = f"checkpoint of round {newer} is damaged: " in got.said
                fine = named and one_line(got.said.strip()) and got.digest == old.digest
                fell_back += fine
            else:
                fine = got.digest == new.digest and not got.said and not (listed and changed)
                harmless += fine
            if not fine:
                lost[kind] += 1
                print(
                    f"{kind} (both: {both}, listed: {listed}): {got.round} {got.error} {got.said}"
                )
    note = f"{fell_back} fell back, {refused} refused (none was good), {harmless} harmless"
    rows = [Row(kind, tried[kind], tried[kind] - lost[kind], lost[kind]) for kind in KINDS]
    whole = f"checkpoint damaged{of_store(config)}"
    total = Row(whole, number, number - lost.total(), lost.total(), note)
    return [total, *(row._replace(kind=f"- {row.kind}") for row in rows if row.tried)]


def needed(directory: Path, step: int) -> list[Path]:
    """The files that a checkpoint is read from."""
    own = sorted(p for p in (directory / "checkpoints" / str(step)).rglob("*") if p.is_file())
    store = checkpoints.open_store(directory / "checkpoints", read_only=True)
    rows = store.facts(step).get("rows") or {"files": ()}
    store.manager.close()
    return [*own, *(directory / "rows" / name for name in rows["files"])]


def contents(directory: Path, listed: bool = True) -> dict[str, bytes]:
    """All files of checkpoints; without the lists of digests where there are none."""

    def files() -> Iterator[Path]:
        for part in ("checkpoints", "rows"):
            yield from (directory / part).rglob("*")

    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in files()
        if p.is_file() and (listed or p.name != checkpoints.SUMS)
    }


if __name__ == "__main__":
    finish(rot(*given(__doc__, faults=100)))
