"""Communication ledger. Counts in Python integers on the host, because 32 bits overflow."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.simulation.records import Log


class Ledger(NamedTuple):
    """Totals since round 0. Holds Python numbers only, for checkpoints in JSON."""

    down: dict[str, int]  # bytes downloaded, by layer
    up: dict[str, int]  # bytes uploaded, by layer
    client_down: list[int]  # bytes downloaded; this and all other lists are by client id
    client_up: list[int]  # bytes uploaded
    client_updates: list[int]  # rounds when the server used the client's update
    dropped: list[int]  # rounds when the client never returned its update
    rejected: list[int]  # rounds when its update was not finite or too large

    @property
    def total_down(self) -> int:
        return sum(self.down.values())

    @property
    def total_up(self) -> int:
        return sum(self.up.values())


def empty(clients: int) -> Ledger:
    """Returns the ledger of `clients` clients before the first round."""
    return Ledger({}, {}, *([0] * clients for _ in range(5)))


def add(ledger: Ledger, logs: Sequence[Log], rounds: int, free_rounds: int = 0) -> Ledger:
    """Returns the ledger after the first `rounds` rounds of one call's logs.

    Args:
      ledger: Totals before the call.
      logs: One log per architecture group, as `CompiledRounds.run` returns them.
      rounds: Number of rounds to count, from the first one in the logs.
      free_rounds: Number of first rounds whose downloads are not counted. Use 1 in the call that
        starts with round 0 if clients build the initial model from the seed.
    """
    down, up = dict(ledger.down), dict(ledger.up)
    client_down, client_up, client_updates, dropped, rejected = (
        list(column) for column in ledger[2:]
    )
    for log in logs:
        ids = np.asarray(log.ids)[:rounds]
        for total, per_client, layer_bytes, free in (
            (down, client_down, log.down, free_rounds),
            (up, client_up, log.up, 0),
        ):
            for layer, amounts in layer_bytes.items():
                counted = np.asarray(amounts)[free:rounds].astype(np.int64)
                total[layer] = total.get(layer, 0) + int(counted.sum())
                _tally(per_client, ids[free:], counted)
        for column, flag in (
            (client_updates, log.arrived),
            (dropped, log.dropped),
            (rejected, log.rejected),
        ):
            _tally(column, ids, np.asarray(flag)[:rounds])
    return Ledger(
        down=down,
        up=up,
        client_down=client_down,
        client_up=client_up,
        client_updates=client_updates,
        dropped=dropped,
        rejected=rejected,
    )


def _tally(column: list[int], ids: np.ndarray, amounts: np.ndarray) -> None:
    """Adds amounts [R, K], of K clients in R rounds, to the entries `ids` [R, K] of `column`."""
    sums = np.zeros(len(column), np.int64)
    np.add.at(sums, ids.ravel(), amounts.ravel().astype(np.int64))
    for i in np.flatnonzero(sums):
        column[i] += int(sums[i])


def from_json(saved: dict[str, Any]) -> Ledger:
    """Returns the ledger with the fields `saved`; the inverse of `_asdict`."""
    return Ledger(**saved)
