"""All tries, one table: python -m tests.stress            (about an hour on two cores)
python -m tests.stress --share=0.1  with so much of each
"""

import argparse

from tests.stress.cohort import missing, spoilt
from tests.stress.common import Row, finish, progress, scratch
from tests.stress.data import data
from tests.stress.disk import disk
from tests.stress.kills import each, kills
from tests.stress.long import long
from tests.stress.processes import VICTIMS, processes
from tests.stress.rot import rot
from tests.stress.same import same


def everything(share: float = 1.0, seed: int = 0) -> list[Row]:
    """Rows of all tries: 100 kills, 12 of one of two processes, 100 damaged checkpoints and
    datasets, 24 disks, 2000 rounds, and for every algorithm a kill, 50 rounds with clients missing
    and three kinds of bad upload."""
    part = lambda whole: max(1, round(share * whole))
    rows: list[Row] = []
    with scratch():  # what is compiled for one serves the others
        for tried in (
            lambda: kills(part(100), seed),
            lambda: each(1, seed),
            lambda: rot(part(100), seed),
            lambda: disk(part(24), seed),
            lambda: data(part(100), seed),
            lambda: missing(max(4, part(50))),
            spoilt,
            same,
            lambda: processes(max(len(VICTIMS), part(12)), seed),
            lambda: long(max(200, part(2000)), 20),
        ):
            rows += tried()
            progress("")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    finish(everything(given.share, given.seed))
