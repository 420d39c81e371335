"""All tries, one table, which docs/robustness.md shows.

python -m tests.stress                  all of them (about an hour on two cores)
python -m tests.stress --only=rot,disk  some of them; the others' rows stay as they were measured
python -m tests.stress --share=0.1      with so much of each; nothing is written
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Collection

from tests.stress import common
from tests.stress.attacks import attacks
from tests.stress.cohort import missing, spoilt
from tests.stress.common import CONFIG, STORES, Row, finish, progress, scratch
from tests.stress.data import data
from tests.stress.disk import disk
from tests.stress.kills import each, kills
from tests.stress.long import long
from tests.stress.processes import VICTIMS, processes
from tests.stress.rot import rot
from tests.stress.same import same


def parts(share: float = 1.0, seed: int = 0) -> dict[str, Callable[[], list[Row]]]:
    """All tries by name: 100 kills, 12 of one of two processes, 100 damaged checkpoints and
    datasets, each damage of each file, 24 disks, 2000 rounds, and for every algorithm a kill, 50
    rounds with clients missing and three kinds of bad upload; and of each store 20 kills, 100
    damaged checkpoints and 12 disks."""

    def part(whole: int) -> int:
        return max(1, round(share * whole))

    return {
        "kills": lambda: kills(part(100), seed),
        "each": lambda: each(1, seed),
        "rot": lambda: rot(part(100), seed),
        "attacks": lambda: attacks(share, seed),
        "disk": lambda: disk(part(24), seed),
        "data": lambda: data(part(100), seed),
        "missing": lambda: missing(max(4, part(50))),
        "spoilt": spoilt,
        "same": same,
        "processes": lambda: processes(max(len(VICTIMS), part(12)), seed),
        "long": lambda: long(max(200, part(2000)), 20),
        "stores": lambda: stores(share, seed),
    }


def stores(share: float = 1.0, seed: int = 0) -> list[Row]:
    """Kills, damaged checkpoints and disks where what stays with clients is elsewhere.

    A checkpoint of a sharded run is that of one on the device.
    """
    rows = []
    for store in ("host", "disk", "sharded"):
        for tried, number in ((kills, 20), (rot, 100), (disk, 12)):
            if (tried, store) != (rot, "sharded"):
                part = max(1, round(share * number))
                rows += tried(part, seed, CONFIG | STORES[store])[:1]
    return rows


def everything(
    share: float = 1.0, seed: int = 0, only: Collection[str] = ()
) -> dict[str, list[Row]]:
    """Rows of all tries, or of some, by name."""
    rows = {}
    with scratch():  # what is compiled for one serves the others
        for name, tried in parts(share, seed).items():
            if name in only or not only:
                rows[name] = tried()
                progress("")
    return rows


def keep(rows: dict[str, list[Row]]) -> None:
    """Write what was measured today where the page reads it, beside what was measured before."""
    whole = json.loads(common.MEASURED.read_text()) if common.MEASURED.exists() else {}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    whole |= {name: {"date": today, "rows": some} for name, some in rows.items()}
    ordered = {name: whole[name] for name in parts() if name in whole}
    common.MEASURED.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="some of: " + ", ".join(parts()))
    given = parser.parse_args()
    chosen = [name for name in given.only.split(",") if name]
    if unknown := set(chosen) - set(parts()):
        sys.exit(f"there are no tries called {', '.join(sorted(unknown))}")
    found = everything(given.share, given.seed, chosen)
    if given.share == 1:
        keep(found)
        print("python docs/written.py puts the table into docs/robustness.md")
    finish([row for rows in found.values() for row in rows])
