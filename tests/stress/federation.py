"""What is done to the processes of a federation over Flower: python -m tests.stress.federation

Runs of FedPer by two nodes, each as `experiments.deploy` starts it. Processes are killed, stopped
and kept from writing while it goes on, one fault a round, and in the end its evaluations, its
clients' rows, its bytes and the nodes' models are those of a simulation in which the same clients
were absent in the same rounds. Each fault has to be named in a line. Only the shares of clients
that are absent over many rounds are tried in one process, with the same server and client code.
"""

import argparse
import datetime
import itertools
import json
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl.deploy import guard, keys
from tests.stress.away import absent, differences
from tests.stress.common import Row, finish, progress
from tests.stress.over_flower import LIMIT, NODES, Federation, ended, stranger

MEASURED = Path(__file__).parent / "federation.json"


def before_training(one: Federation, rng: np.random.Generator) -> str:
    """A node loses its power as soon as the next round has begun."""
    i = int(rng.integers(NODES))
    one.next_round()
    seen = one.ctx(i)
    ended(one.node(i))
    assert one.ctx(i) == seen
    return f"node-{i} has ended"


def before_answering(one: Federation, rng: np.random.Generator) -> str:
    """A node loses its power when what it has trained is on its disk, and not yet on its way."""
    i = int(rng.integers(NODES))
    seen = one.ctx(i)
    one.until(lambda: one.ctx(i) > seen, f"a visit of client {i}")
    sent = one.sent(i)
    ended(one.node(i))
    time.sleep(1)
    assert one.sent(i) == sent
    return f"node-{i} has ended"


def after_answering(one: Federation, rng: np.random.Generator) -> str:
    """A node loses its power when its answer is there, and another one's is not."""
    i = int(rng.integers(NODES))
    other, seen = one.worker(1 - i), one.ctx(i)
    ended([other], signal.SIGSTOP)
    one.until(lambda: one.ctx(i) > seen, f"a visit of client {i}")
    sent = one.sent(i)
    one.until(lambda: one.sent(i) > sent, f"an answer of client {i}")
    ended(one.node(i))
    ended([other], signal.SIGCONT)
    return f"node-{i} has ended"


def worker(one: Federation, rng: np.random.Generator) -> str:
    """The process in which a node computes is killed."""
    i = int(rng.integers(NODES))
    time.sleep(rng.uniform(0, 3))
    ended([one.worker(i)])
    return f"worker-{i} has ended"


def app(one: Federation, rng: np.random.Generator) -> str:
    """The process in which the server computes is killed."""
    one.until(lambda: bool(one.pids("flwr-serverapp")), "the server's app")
    time.sleep(rng.uniform(0, 10))
    ended(one.pids("flwr-serverapp"))
    return "The server's app has ended"


def link(one: Federation, rng: np.random.Generator) -> str:
    """The SuperLink is killed, and what it has started ends with it."""
    time.sleep(rng.uniform(0, 10))
    ended(one.pids("flower-superlink"))
    return "superlink has ended"


def command(one: Federation, rng: np.random.Generator) -> str:
    """The whole trial is killed, and given again."""
    time.sleep(rng.uniform(0, 10))
    one.close()
    assert guard.left(one.home) == []
    one.start()
    return ""


def stopped(one: Federation, rng: np.random.Generator) -> str:
    """A node is cut off for 30 seconds: all that runs there is stopped."""
    i = int(rng.integers(NODES))
    pids = one.node(i)
    ended(pids, signal.SIGSTOP)
    time.sleep(30)
    ended(pids, signal.SIGCONT)
    return ""


def full(one: Federation, rng: np.random.Generator) -> str:
    """A node can write no file until it has said so."""
    i = int(rng.integers(NODES))
    pid, lines = one.worker(i), one.said().count("its disk cannot be written")
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    one.until(lambda: one.said().count("its disk cannot be written") > lines, "a line on the disk")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    return f"client {i}: it has refused: its disk cannot be written"


def wrong_key(one: Federation, rng: np.random.Generator) -> str:
    """A node comes whose key is not registered."""
    keys.node_key(one.place / "stranger.key")
    said = stranger(one, one.place / "stranger.key")
    assert "Failed to initialize the connection" in said, said
    return ""


def same_key(one: Federation, rng: np.random.Generator) -> str:
    """A second node comes with the key of one that is there."""
    i = int(rng.integers(NODES))
    said = stranger(one, one.nodes / f"client-{i}.key")
    assert "Failed to initialize the connection" in said, said
    return ""


class Fault(NamedTuple):
    """What is done, and what it is called."""

    kind: str
    do: Callable[[Federation, np.random.Generator], str]
    often: int


FAULTS = (
    Fault("SIGKILL of a node before it trains", before_training, 2),
    Fault("SIGKILL of a node between saving and answering", before_answering, 3),
    Fault("SIGKILL of a node that has answered", after_answering, 2),
    Fault("SIGKILL of a node's worker", worker, 3),
    Fault("SIGKILL of the server's app", app, 5),
    Fault("SIGKILL of the SuperLink", link, 3),
    Fault("SIGKILL of the whole trial, given again", command, 2),
    Fault("a node cut off for 30 s", stopped, 1),
    Fault("a node whose disk is full", full, 1),
    Fault("a node with a key that is not registered", wrong_key, 1),
    Fault("two nodes with the same key", same_key, 1),
)


class Tried(NamedTuple):
    """What became of one fault, or of a run."""

    kind: str
    wrong: str  # empty: nothing
    seconds: float  # until the next round was over


END = "the end of a run"


def federation(place: Path, faults: list[Fault], rng: np.random.Generator) -> list[Tried]:
    """One run with these faults, one after the other, each while a round is under way."""
    place.mkdir()
    one, found = Federation(place, len(faults) * 3 // 2 + 2), []
    fault = faults[0]
    try:
        one.next_round()
        for fault in faults:
            progress(f"{fault.kind}, round {one.rounds() + 1}")
            at, began = len(one.said()), time.monotonic()
            line = fault.do(one, rng)
            one.next_round()
            wrong = "" if line in one.said()[at:] else f"no line says that {line}"
            found.append(Tried(fault.kind, wrong, time.monotonic() - began))
        status = one.process.wait(LIMIT)
        wrongs = [f"status {status}"] if status else differences(one)
        wrongs += ["processes are left"] if guard.left(one.home) else []
        wrongs += ["a traceback is said"] if "Traceback" in one.said() else []
        found.append(Tried(END, "; ".join(wrongs), 0.0))
    except (RuntimeError, TimeoutError, AssertionError, subprocess.TimeoutExpired) as error:
        found.append(Tried(fault.kind, " ".join(f"{error!r}".split()), 0.0))
    finally:
        one.close()
    if any(tried.wrong for tried in found):
        print(one.said())
    return found


def federations(share: float = 1.0, seed: int = 0, of: int = 12) -> Iterator[list[Tried]]:
    """Every fault as often as it is to be tried, in runs of at most so many."""
    rng = np.random.default_rng(seed)
    queue = [one for one in FAULTS for _ in range(max(1, round(share * one.often)))]
    queue = [queue[i] for i in rng.permutation(len(queue))]
    with tempfile.TemporaryDirectory(prefix="federation-") as name:
        for k in range(0, len(queue), of):
            yield federation(Path(name) / f"run{k}", queue[k : k + of], rng)


def away(rounds: int = 50, seed: int = 0) -> list[Tried]:
    """Nodes that are absent, in one process."""
    row = absent(rounds, seed)
    return [Tried(row.kind, row.note if row.lost else "", 0.0)] * row.tried


def rows(tried: Iterable[Tried]) -> list[Row]:
    """A row for each kind, in the order in which they come."""
    found: dict[str, list[Tried]] = {}
    for one in tried:
        found.setdefault(one.kind, []).append(one)
    return [_row(kind, each) for kind, each in found.items()]


def _row(kind: str, each: list[Tried]) -> Row:
    bad = [one.wrong for one in each if one.wrong]
    longest = max(one.seconds for one in each)
    note = f"the next round was over after {longest:.0f} s at most" if longest else ""
    return Row(kind, len(each), len(each) - len(bad), len(bad), "; ".join(bad) or note)


def keep(tried: list[Tried]) -> None:
    """Write what became of a run where the page reads it, beside what was measured before."""
    whole = json.loads(MEASURED.read_text()) if MEASURED.exists() else []
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    whole.append({"date": today, "tried": tried})
    lines = [json.dumps(one, ensure_ascii=False) for one in whole]
    MEASURED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="so much of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="to what was measured before")
    given = parser.parse_args()
    if not given.add:
        MEASURED.unlink(missing_ok=True)
    runs = []
    for run in itertools.chain([away()], federations(given.share, given.seed)):
        keep(run)
        runs.append(run)
    print("python docs/written.py puts the table into docs/robustness.md")
    finish(rows([one for run in runs for one in run]))
