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
from tests.stress.common import CONFIG, STORES, Row, progress, scratch, table
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
        for campaign, number in ((kills, 20), (rot, 100), (disk, 12)):
            if (campaign, store) != (rot, "sharded"):
                part = max(1, round(share * number))
                rows += campaign(part, seed, CONFIG | STORES[store])[:1]
    return rows


def run(share: float = 1.0, seed: int = 0, only: Collection[str] = ()) -> dict[str, list[Row]]:
    """Returns the rows of all campaigns, or of some, by name."""
    rows = {}
    with scratch():  # campaigns share compiled programs
        for name, campaign in parts(share, seed).items():
            if name in only or not only:
                rows[name] = campaign()
                progress("")
    return rows


def keep(rows: dict[str, list[Row]]) -> None:
    """Writes today's rows to the file that the page reads; rows of other campaigns stay."""
    record = json.loads(common.MEASURED.read_text()) if common.MEASURED.exists() else {}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    record |= {name: {"date": today, "rows": new} for name, new in rows.items()}
    ordered = {name: record[name] for name in parts() if name in record}
    common.MEASURED.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="some of: " + ", ".join(parts()))
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - set(parts()):
        sys.exit(f"there are no campaigns called {', '.join(sorted(unknown))}")
    rows = run(args.share, args.seed, names)
    if args.share == 1:
        keep(rows)
        print("python docs/written.py puts the table into docs/robustness.md")
    total = [row for part in rows.values() for row in part]
    print(table(total))
    sys.exit(int(any(row.lost for row in total)))
