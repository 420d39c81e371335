"""Lower bounds of the memory that a run needs, from shapes and before anything is compiled.

The memory of local training is not included; `memory_gb` estimates it. On a CPU, device memory and
host memory are the same.
"""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.mapped import is_mapped

_CHECKPOINTS = 2  # that a run directory holds
_AUTO_SHARE = 0.5  # fraction of a memory that store=auto may fill


class PhaseSizes(NamedTuple):
    """Sizes of a phase, which is a part of a run with one method. Bytes, unless noted."""

    server: int  # shared server-side state
    row: int  # server-side row of one client
    client: int  # client-side state of one client
    clients: int  # number of clients
    cohort: int  # number of clients sampled in a round
    rounds: int  # number of rounds
    examples: int  # all examples, with the index tables of the clients
    cohort_examples: int  # examples of the largest cohort
    has_best: bool  # True if the best state is stored as well as the last
    sweep_runs: int = 1  # number of runs that one program computes
    devices: int = 1  # number of devices
    mapped: int = 0  # part of `examples` that is memory-mapped from files
    offload: int = 0  # part of `row` that may be stored off the device


class Requirement(NamedTuple):
    """Lower bounds of the bytes that a run needs."""

    device: int  # on each device
    host: int  # in host memory
    disk: int  # on disk


class Capacity(NamedTuple):
    """Bytes that a machine has; infinite if unknown."""

    device: float  # of each device
    host: float  # of host memory
    disk: float  # of disk space
    has_device_memory: bool  # False if devices use host memory
    devices: int = 1  # devices of this process


def format_bytes(count: float) -> str:
    """Formats a number of bytes with a decimal unit, such as "1.23 MB"; 1 kB is 1,000 bytes."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3f}".rstrip("0").rstrip(".") + " PB"


def required(sizes: PhaseSizes, store: str) -> Requirement:
    """Returns the bytes that a phase needs with a store of `programs.STORES`."""
    states = 2 if sizes.has_best else 1
    shared = sizes.sweep_runs * (sizes.server + sizes.clients * sizes.row)
    if store in ("device", "sharded"):
        per_client = sizes.row + sizes.client
        state = sizes.sweep_runs * (sizes.server + sizes.clients * per_client)
        on_device = state
        if store == "sharded":
            on_device = sizes.server + -(-sizes.clients // sizes.devices) * per_client
        # The host holds the copy for a checkpoint and the best state.
        return Requirement(
            on_device + sizes.examples, states * state, _CHECKPOINTS * states * state
        )
    shared -= sizes.sweep_runs * sizes.clients * sizes.offload
    sampled = min(sizes.clients, sizes.rounds * sizes.cohort)
    changed = states * sampled * (sizes.client + sizes.offload)
    # The cohort's states before and after the round, and those of the next cohort.
    device = shared + 3 * sizes.cohort * sizes.client + 2 * sizes.cohort_examples
    device += 2 * sizes.cohort * sizes.offload
    host = states * shared + sizes.examples - sizes.mapped + (changed if store == "host" else 0)
    saved = _CHECKPOINTS * (states * shared + changed)
    return Requirement(device, host, saved + (changed if store == "disk" else 0))


def maximum(requirements: Sequence[Requirement]) -> Requirement:
    """Returns the largest requirement of each kind of memory."""
    return Requirement(*map(max, zip(*requirements, strict=True)))


def capacity(devices: int = 1) -> Capacity:
    """Returns the memory of this machine. Disk space counts as infinite.

    Args:
      devices: Devices of this process that the run uses.
    """
    host = math.inf
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    first = jax.local_devices()[0]
    has_device_memory = first.platform != "cpu"
    device = host
    if has_device_memory:
        device = (first.memory_stats() or {}).get("bytes_limit", math.inf)
    return Capacity(
        device=float(device),
        host=float(host),
        disk=math.inf,
        has_device_memory=has_device_memory,
        devices=devices,
    )


def shortage(required: Requirement, available: Capacity) -> str:
    """Returns text with the bytes needed of a memory that is too small, or "" if all fits."""
    host = required.host
    if not available.has_device_memory:
        host += available.devices * required.device
    for place, value, limit in (
        ("on a device", required.device, available.device),
        ("of memory", host, available.host),
        ("on disk", required.disk, available.disk),
    ):
        if value > limit:
            return f"{format_bytes(value)} {place} ({format_bytes(limit)} available)"
    return ""


def _fits_well(required: Requirement, available: Capacity) -> bool:
    """Returns True if at most the fraction `_AUTO_SHARE` of each memory is needed."""
    share = available._replace(
        device=_AUTO_SHARE * available.device, host=_AUTO_SHARE * available.host
    )
    return not shortage(required, share)


def choose_store(
    phases: Sequence[PhaseSizes], store: str, available: Capacity, *, several: bool, processes: int
) -> str:
    """Returns the store of a run, one of `programs.STORES`; with "auto" the first that fits.

    Raises UsageError if the run does not fit into memory.

    Args:
      phases: Sizes of each phase.
      store: The setting `store`: "auto" or one of `programs.STORES`.
      available: Memory of this machine.
      several: True if one program computes several runs, which requires state on the device.
      processes: Number of processes; more than one rules out the host and the disk.
    """
    sharded = ("sharded",) if phases[0].devices > 1 and not several else ()
    off_device = ("host", "disk") if processes == 1 and not several else ()
    stores = ("device", *sharded, *off_device)
    if store == "sharded" and not sharded:
        store = "device"  # the same thing with one device
    needs = {name: maximum([required(sizes, name) for sizes in phases]) for name in stores}
    fitting = [name for name in stores if not shortage(needs[name], available)]
    if store == "auto":
        fitting_well = [name for name in stores if _fits_well(needs[name], available)]
        store = (fitting_well or fitting or stores)[0]
    if problem := shortage(needs[store], available):
        hint = f"use store={fitting[0]}" if fitting else "use fewer clients or examples"
        raise UsageError(
            f"with store={store} this run needs at least {problem}; {hint}, or a smaller model"
        )
    return store


def example_bytes(arrays: Any, cohort: int) -> tuple[int, int, int]:
    """Returns bytes: of all examples, of the largest cohort's, and of memory-mapped examples.

    The largest cohort has the clients with the most examples for training and validation.

    Args:
      arrays: Examples of all clients, as `FederatedData`.
      cohort: Number of clients in a round.
    """
    leaves = list(map(np.asarray, jax.tree.leaves(arrays)))
    total, mapped = (
        sum(leaf.nbytes for leaf in part) for part in (leaves, filter(is_mapped, leaves))
    )
    counts = np.asarray(arrays.train.size, np.int64) + np.asarray(arrays.validation.size, np.int64)
    largest = min(int(np.sort(counts)[-cohort:].sum()), len(arrays.y))
    bytes_per_example = sum(leaf.nbytes for leaf in (arrays.x, arrays.y)) / max(1, len(arrays.y))
    return total, math.ceil(bytes_per_example * largest), mapped
