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
from fedjax_pfl.data.mapped import is_mapped

_KEPT = 2  # checkpoints
_SHARE = 0.5  # of a memory that is taken without being asked for


class Sizes(NamedTuple):
    """Of a phase; bytes and numbers."""

    server: int  # what all share
    row: int  # what the server keeps for a client
    client: int  # what stays with one
    clients: int
    cohort: int
    rounds: int
    examples: int  # of all clients, with the tables that say whose they are
    sent: int  # those of a cohort at most
    best: bool  # whether a best round is kept beside the last
    points: int = 1  # of a sweep
    devices: int = 1
    mapped: int = 0  # of the examples, what is in files
    offload: int = 0  # of the bytes of `row`, what may lie with what stays with a client


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
    devices: int = 1  # that this process computes with


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
    shared = sizes.points * (sizes.server + sizes.clients * sizes.row)
    if store in ("device", "sharded"):
        each = sizes.row + sizes.client
        state = sizes.points * (sizes.server + sizes.clients * each)
        held = state
        if store == "sharded":
            held = sizes.server + -(-sizes.clients // sizes.devices) * each
        # A copy on its way to a checkpoint, and the best one.
        return Need(held + sizes.examples, states * state, _KEPT * states * state)
    shared -= sizes.points * sizes.clients * sizes.offload
    trained = min(sizes.clients, sizes.rounds * sizes.cohort)
    changed = states * trained * (sizes.client + sizes.offload)
    # The cohort's before and after the round; the next cohort's is on its way.
    device = shared + 3 * sizes.cohort * sizes.client + 2 * sizes.sent
    device += 2 * sizes.cohort * sizes.offload
    host = states * shared + sizes.examples - sizes.mapped + (changed if store == "host" else 0)
    saved = _KEPT * (states * shared + changed)
    return Need(device, host, saved + (changed if store == "disk" else 0))


def most(each: Sequence[Need]) -> Need:
    """Of several phases."""
    return Need(*map(max, zip(*each, strict=True)))


def room(devices: int = 1) -> Room:
    """What this machine has; how much of its disk is for a run, nobody knows.

    devices: those of this process that a run uses.
    """
    host = math.inf
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    first = jax.local_devices()[0]
    apart = first.platform != "cpu"
    known = (first.memory_stats() or {}).get("bytes_limit", math.inf) if apart else host
    return Room(float(known), float(host), math.inf, apart, devices)


def lacking(wanted: Need, there: Room) -> str:
    """What there is too little of, in words; nothing where all fits."""
    host = wanted.host if there.apart else wanted.host + there.devices * wanted.device
    for name, value, limit in (
        ("on a device", wanted.device, there.device),
        ("of memory", host, there.host),
        ("on disk", wanted.disk, there.disk),
    ):
        if value > limit:
            return f"{readable(value)} {name}, of which there are {readable(limit)}"
    return ""


def _fits_well(wanted: Need, there: Room) -> bool:
    some = there._replace(device=_SHARE * there.device, host=_SHARE * there.host)
    return not lacking(wanted, some)


def choose(each: Sequence[Sizes], store: str, there: Room, *, several: bool, processes: int) -> str:
    """The store of a run, where it is auto; UsageError where what is needed is not there.

    Args:
      each: of its phases.
      several: whether a program computes several runs, which are on the device.
      processes: that compute it; with several of them, devices are all that they have in common.
    """
    sharded = ("sharded",) if each[0].devices > 1 and not several else ()
    elsewhere = ("host", "disk") if processes == 1 and not several else ()
    stores = ("device", *sharded, *elsewhere)
    if store == "sharded" and not sharded:
        store = "device"  # which one device is
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


def examples_of(arrays: Any, cohort: int) -> tuple[int, int, int]:
    """Bytes of all examples, of those of a cohort at most, and of what of all is in files."""
    leaves = list(map(np.asarray, jax.tree.leaves(arrays)))
    whole, mapped = (
        sum(leaf.nbytes for leaf in some) for some in (leaves, filter(is_mapped, leaves))
    )
    own = np.asarray(arrays.train.size, np.int64) + np.asarray(arrays.validation.size, np.int64)
    number = int(np.sort(own)[-cohort:].sum())
    one = sum(leaf.nbytes for leaf in (arrays.x, arrays.y)) / max(1, len(arrays.y))
    return whole, math.ceil(one * min(number, len(arrays.y))), mapped
