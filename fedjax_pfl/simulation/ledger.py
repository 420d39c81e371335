"""Communication, counted on the host in Python integers: 32 bits overflow."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.simulation.records import Log


class Ledger(NamedTuple):
    """Totals since round 0. Plain numbers, so that a checkpoint can hold it as JSON."""

    down: dict[str, int]  # bytes by layer
    up: dict[str, int]
    client_down: list[int]  # bytes by client
    client_up: list[int]
    visits: list[int]  # times that a client's answer counted
    dropped: list[int]
    rejected: list[int]

    @property
    def total_down(self) -> int:
        return sum(self.down.values())

    @property
    def total_up(self) -> int:
        return sum(self.up.values())


def empty(clients: int) -> Ledger:
    """Nothing has moved yet."""
    return Ledger({}, {}, *([0] * clients for _ in range(5)))


def add(ledger: Ledger, logs: Sequence[Log], rounds: int, free_rounds: int = 0) -> Ledger:
    """The ledger after the first `rounds` rounds of one call's logs.

    Args:
      logs: one per group, as `CompiledRounds.run` returns them.
      free_rounds: the downloads of this many first rounds of the call cost nothing: round 0, where
        everybody can build the initial model from the seed.
    """
    down, up = dict(ledger.down), dict(ledger.up)
    lists = [list(column) for column in ledger[2:]]
    for log in logs:
        ids = np.asarray(log.ids)[:rounds]
        for total, per_client, bill, free in (
            (down, lists[0], log.down, free_rounds),
            (up, lists[1], log.up, 0),
        ):
            for layer, amounts in bill.items():
                paid = np.asarray(amounts)[free:rounds].astype(np.int64)
                total[layer] = total.get(layer, 0) + int(paid.sum())
                _tally(per_client, ids[free:], paid)
        present, dropped, rejected = (
            np.asarray(flag)[:rounds] for flag in (log.present, log.dropped, log.rejected)
        )
        _tally(lists[2], ids, present & ~dropped & ~rejected)
        _tally(lists[3], ids, dropped)
        _tally(lists[4], ids, rejected)
    return Ledger(down, up, *lists)


def _tally(column: list[int], ids: np.ndarray, amounts: np.ndarray) -> None:
    sums = np.zeros(len(column), np.int64)
    np.add.at(sums, ids.ravel(), amounts.ravel().astype(np.int64))
    for i in np.flatnonzero(sums):
        column[i] += int(sums[i])


def from_json(saved: dict[str, Any]) -> Ledger:
    """The ledger that `_asdict()` was saved from."""
    return Ledger(**saved)
