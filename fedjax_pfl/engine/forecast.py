"""How much of each kind of memory a run needs at the least, from shapes: before it is compiled.

What local training takes beside is not in it (`memory_gb` estimates that). On a CPU the devices'
memory is the machine's.
"""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core.errors import UsageError

_KEPT = 2  # checkpoints
_SHARE = 0.5  # of a memory that is taken without being asked for


class Sizes(NamedTuple):
    """Of a phase; bytes and numbers."""

    shared: int  # the server's part, and what it keeps for all clients
    client: int  # what stays with one
    clients: int
    cohort: int
    rounds: int
    examples: int  # of all clients, with the tables that say whose they are
    sent: int  # those of a cohort at most
    best: bool  # whether a best round is kept beside the last
    points: int = 1  # of a sweep


class Need(NamedTuple):
    """Bytes."""

    device: int
    host: int
    disk: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {readable(value)}" for name, value in self._asdict().items())


class Room(NamedTuple):
    """Bytes that there are; infinite where that is not known."""

    device: float
    host: float
    disk: float
    apart: bool  # whether a device has memory of its own


def readable(number: float) -> str:
    """Bytes with three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if number < 999.5 or unit == "PB":
            break
        number /= 1000
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"


def need(sizes: Sizes, store: str) -> Need:
    """What a phase needs with a store."""
    states = 2 if sizes.best else 1
    shared = sizes.points * sizes.shared
    if store == "device":
        state = sizes.points * (sizes.shared + sizes.clients * sizes.client)
        # A copy on its way to a checkpoint, and the best one.
        return Need(state + sizes.examples, states * state, _KEPT * states * state)
    trained = min(sizes.clients, sizes.rounds * sizes.cohort)
    changed = states * trained * sizes.client
    # The cohort's before and after the round; the next cohort's is on its way.
    device = shared + 3 * sizes.cohort * sizes.client + 2 * sizes.sent
    host = states * shared + sizes.examples + (changed if store == "host" else 0)
    saved = _KEPT * (states * shared + changed)
    return Need(device, host, saved + (changed if store == "disk" else 0))


def most(each: Sequence[Need]) -> Need:
    """Of several phases."""
    return Need(*map(max, zip(*each, strict=True)))


def room() -> Room:
    """What this machine has; how much of its disk is for a run, nobody knows."""
    host = math.inf
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    first = jax.local_devices()[0]
    apart = first.platform != "cpu"
    known = (first.memory_stats() or {}).get("bytes_limit", math.inf) if apart else host
    return Room(float(known), float(host), math.inf, apart)


def lacking(wanted: Need, there: Room) -> str:
    """What there is too little of, in words; nothing where all fits."""
    host = wanted.host if there.apart else wanted.host + wanted.device
    for name, value, limit in (
        ("on a device", wanted.device, there.device),
        ("of memory", host, there.host),
        ("on disk", wanted.disk, there.disk),
    ):
        if value > limit:
            return f"{readable(value)} {name}, of which there are {readable(limit)}"
    return ""


def _fits_well(wanted: Need, there: Room) -> bool:
    some = Room(_SHARE * there.device, _SHARE * there.host, there.disk, there.apart)
    return not lacking(wanted, some)


def choose(each: Sequence[Sizes], store: str, there: Room, *, alone: bool) -> str:
    """The store of a run, where it is auto; UsageError where what is needed is not there.

    Args:
      each: of its phases.
      alone: whether it is one run in one process, without which only the device can be.
    """
    stores = ("device", "host", "disk") if alone else ("device",)
    needs = {name: most([need(sizes, name) for sizes in each]) for name in stores}
    if store == "auto":
        well = [name for name in stores if _fits_well(needs[name], there)]
        store = (well or [name for name in stores if not lacking(needs[name], there)] or stores)[0]
    if wrong := lacking(needs[store], there):
        others = [name for name in stores if not lacking(needs[name], there)]
        hint = f"use store={others[0]}" if others else "take fewer clients or examples"
        raise UsageError(
            f"with store={store} this run needs at least {wrong}; {hint}, or a smaller model"
        )
    return store


def examples_of(arrays: Any, cohort: int) -> tuple[int, int]:
    """Bytes of all examples and of those of a cohort at most."""
    whole = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(arrays))
    own = np.asarray(arrays.train.size, np.int64) + np.asarray(arrays.validation.size, np.int64)
    number = int(np.sort(own)[-cohort:].sum())
    one = sum(leaf.nbytes for leaf in (arrays.x, arrays.y)) / max(1, len(arrays.y))
    return whole, math.ceil(one * min(number, len(arrays.y)))
