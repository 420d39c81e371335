"""SIGKILL of one of two processes that compute one run: python -m tests.stress.processes --kills=12

Of process 0, of process 1 and of the one that started them in turn, while they start, compile or
compute; and of one of two that were started each by itself, as on two machines. The others have to
end within 15 seconds with one line, and what comes out in the end is what an undisturbed run of two
processes gives, bit for bit.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import numpy as np

from tests.commands import Command, digests, free_port, metrics
from tests.stress.common import Row, finish, progress, scratch

WITHIN = 15.0
VICTIMS = ("process 0", "process 1", "the one that started them", "process 1 of two commands")


def outcome(directory: Path) -> object:
    """All that is compared of a finished run."""
    tables = [(directory / name).read_text() for name in ("clients.csv", "traffic.json")]
    return metrics(directory), tables, digests(directory)


def commands(cache: Path, directory: Path, apart: bool) -> list[Command]:
    """One that starts two processes, or two of one each."""
    if not apart:
        return [Command(cache, "--processes=2", f"--workdir={directory}")]
    one = (f"--coordinator=127.0.0.1:{free_port()}", "--processes=2", f"--workdir={directory}")
    return [Command(cache, *one, f"--process={i}") for i in range(2)]


def begun(started: list[Command]) -> list[int]:
    """The processes that compute, as soon as there are two; none where it is over already."""
    while not any(command.process.poll() is not None for command in started):
        try:
            workers = [pid for command in started for pid in command.workers()]
        except OSError:
            break
        if len(workers) == 2:
            return workers
        time.sleep(0.02)
    return []


def killed(started: list[Command], victim: int, seconds: float) -> tuple[float, str] | None:
    """After so long; how long the others took, and what they said. None where it was too late."""
    workers = begun(started)
    time.sleep(seconds)
    pid = started[0].process.pid if victim == 2 else (workers or [0])[min(victim, 1)]
    late = not workers or any(command.process.poll() is not None for command in started)
    try:
        if not late:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        late = True
    began = time.monotonic()
    while any(map(alive, workers)) and time.monotonic() < began + 60:
        time.sleep(0.02)
    took = time.monotonic() - began
    said = "".join(command.ended()[2] for command in started)
    return None if late else (took, said)


def alive(pid: int) -> bool:
    """And not one of those that are over and that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes(number: int = 12, seed: int = 0) -> list[Row]:
    """So many kills; a row for each kind of victim."""
    rng = np.random.default_rng(seed)
    rows = []
    with scratch() as place:
        for name in ("compiled", "undisturbed"):
            undisturbed = commands(place / "cache", place / name, False)
            begun(undisturbed)
            began = time.monotonic()
            undisturbed[0].ended()
        whole = time.monotonic() - began
        wanted = outcome(place / "undisturbed")
        for victim, name in enumerate(VICTIMS):
            tried, bad, slowest, lines = 0, 0, 0.0, set[str]()
            for k in range(-(-(number - victim) // len(VICTIMS))):
                directory, apart = place / f"run{victim}-{k}", victim == 3
                happened = killed(
                    commands(place / "cache", directory, apart), victim, rng.uniform(0, 0.8 * whole)
                )
                progress(f"{name}: {happened}")
                for command in (again := commands(place / "cache", directory, apart)):
                    command.ended()
                same = not any(c.process.returncode for c in again) and outcome(directory) == wanted
                if happened is None:
                    bad += not same
                    continue
                took, said = happened
                silent = victim == 2  # whoever would say it is gone
                apart_lines = 2 if apart else 1
                tried, slowest = tried + 1, max(slowest, took)
                fine = said.count("\n") == (0 if silent else apart_lines)
                if not (same and fine and took < WITHIN):
                    bad += 1
                    print(f"{name}: {took:.1f} s, the same: {same}, said: {said}")
                lines |= set(said.splitlines())
            note = f"the others ended within {slowest:.1f} s; {' | '.join(sorted(lines))}"
            rows.append(Row(f"SIGKILL of {name}", tried, tried - bad, bad, note))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    finish(processes(given.kills, given.seed))
