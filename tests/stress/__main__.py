"""Runs all robustness campaigns and writes the table of docs/robustness.md.

python -m tests.stress                  all campaigns (about half an hour on two cores)
python -m tests.stress --only=rot,disk  some campaigns; the rows of the others stay
python -m tests.stress --share=0.1      a tenth of the faults; nothing is written
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Collection

from tests.stress import common
from tests.stress.common import CONFIG, STORES, Row, finish, progress, scratch
from tests.stress.data import data
from tests.stress.disk import disk
from tests.stress.kills import kills
from tests.stress.long import long
from tests.stress.rot import rot


def parts(share: float = 1.0, seed: int = 0) -> dict[str, Callable[[], list[Row]]]:
    """Returns all campaigns by name.

    Args:
      share: Fraction of the full number of faults.
      seed: Seed of the faults.
    """

    def scaled(number: int) -> int:
        return max(1, round(share * number))

    return {
        "kills": lambda: kills(scaled(100), seed),
        "rot": lambda: rot(scaled(100), seed),
        "disk": lambda: disk(scaled(24), seed),
        "data": lambda: data(scaled(100), seed),
        "long": lambda: long(max(200, scaled(2000)), 20),
        "stores": lambda: stores(share, seed),
    }


def stores(share: float = 1.0, seed: int = 0) -> list[Row]:
    """Runs kills, damaged checkpoints and disk faults with client state off the device.

    Checkpoints of sharded runs equal those of runs on one device, so they are not damaged again.
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
    """Returns the rows of all campaigns, or of some, by name."""
    rows = {}
    with scratch():  # campaigns share compiled programs
        for name, tried in parts(share, seed).items():
            if name in only or not only:
                rows[name] = tried()
                progress("")
    return rows


def keep(rows: dict[str, list[Row]]) -> None:
    """Writes today's rows to the file that the page reads; rows of other campaigns stay."""
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
        sys.exit(f"there are no campaigns called {', '.join(sorted(unknown))}")
    found = everything(given.share, given.seed, chosen)
    if given.share == 1:
        keep(found)
        print("python docs/written.py puts the table into docs/robustness.md")
    finish([row for rows in found.values() for row in rows])
