"""Runs that several processes compute, connected by `jax.distributed.initialize`.

All processes have the same settings, examples and state. Process 0 reads and writes files and
decides what could differ between processes. With one process these functions do nothing.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # the key-value store has no public name
from jax.experimental import multihost_utils

from fedjax_pfl.core.errors import UsageError

PyTree = Any


class AgreedError(UsageError):
    """A UsageError that every process of the run raises, with the same message."""


_TIMEOUT = 2**31 - 1  # milliseconds; JAX's heartbeat reports a process that has died
_agreements = itertools.count()


def count() -> int:
    """Returns the number of processes."""
    return global_state.num_processes


def lead() -> bool:
    """Returns True in process 0, which reads, writes and prints."""
    return global_state.process_id == 0


def _first(values: list[Any]) -> Any:
    return values[0]


def agree(value: Any, decide: Callable[[list[Any]], Any] = _first) -> Any:
    """Returns in all processes what process 0 decides from one value of each process.

    All processes must call this, and wait for each other.

    Args:
      value: Value of this process, as plain data for JSON.
      decide: Maps the values of all processes to the result. Default: the value of process 0.
    """
    if count() == 1:
        return decide([value])
    store, number = global_state.client, next(_agreements)
    assert store is not None
    prefix = f"fedjax_pfl/{number}"
    store.key_value_set(f"{prefix}/{global_state.process_id}", json.dumps(value))

    def read(name: Any) -> Any:
        return json.loads(store.blocking_key_value_get(f"{prefix}/{name}", _TIMEOUT))

    if not lead():
        return read("decision")
    decision = decide([read(i) for i in range(count())])
    store.key_value_set(f"{prefix}/decision", json.dumps(decision))
    if number:  # all processes have read the previous decision
        store.key_value_delete(f"fedjax_pfl/{number - 1}")
    return decision


def broadcast(tree: PyTree) -> PyTree:
    """Returns the arrays of process 0 in all processes, bit for bit.

    Other processes pass arrays of the same shapes and dtypes; their values are ignored.
    """
    if count() == 1:
        return tree
    arrays = jax.tree.map(np.asarray, tree)
    # Bytes: the broadcast is a sum over processes, and -0.0 + 0.0 is 0.0.
    received = multihost_utils.broadcast_one_to_all(
        jax.tree.map(lambda a: np.ascontiguousarray(a).reshape(-1).view(np.uint8), arrays)
    )
    return jax.tree.map(lambda a, b: np.array(b).view(a.dtype).reshape(a.shape), arrays, received)


def replicate(tree: PyTree, everywhere: jax.sharding.Sharding) -> PyTree:
    """Puts arrays that every process has on all devices; returns JAX arrays.

    `jax.device_put` would first compare the arrays of all processes.

    Args:
      tree: Arrays, the same in all processes.
      everywhere: Replicated sharding over the devices of all processes.
    """
    if everywhere.is_fully_addressable:
        return jax.device_put(tree, everywhere)

    def replicate_leaf(leaf: Any) -> jax.Array:
        """Returns the array, or the random key, on all devices."""
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            bits = replicate_leaf(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, everywhere, lambda part: host[part])

    return jax.tree.map(replicate_leaf, tree)


def devices(limit: int | None) -> Sequence[jax.Device]:
    """Returns `limit` devices, the same number from each process, or all if `limit` is None.

    Raises UsageError if there are fewer, or if `limit` is no multiple of the processes.
    """
    available = jax.devices()
    if limit is None:
        return available
    per_process, remainder = divmod(limit, count())
    if remainder:
        raise UsageError(f"devices is {limit}, not a multiple of the {count()} processes")
    by_process = [[d for d in available if d.process_index == i] for i in range(count())]
    used = [d for local_devices in by_process for d in local_devices[:per_process]]
    if len(used) < limit:
        place = "this machine has" if count() == 1 else f"the {count()} processes have"
        raise UsageError(f"devices is {limit}, but {place} only {len(available)}; use fewer")
    return used


def check_settings(settings: Mapping[str, Any], ignored: Iterable[str] = ()) -> None:
    """Raises AgreedError in all processes if one has other settings than process 0.

    Args:
      settings: Settings of this process as plain data.
      ignored: Names of settings that may differ between processes.
    """
    ignored = set(ignored)

    def compare(all_settings: list[Any]) -> str:
        """Returns text with the first difference, or "" if all settings agree."""
        first = dict(_flatten(all_settings[0]))
        for i, other in enumerate(dict(_flatten(settings)) for settings in all_settings):
            for name in sorted({*first, *other} - ignored):
                a, b = (values.get(name, "nothing") for values in (first, other))
                if a != b and (a == a or b == b):  # a later check reports NaN
                    return f"{name} is {a!r} in process 0 and {b!r} in process {i}"
        return ""

    if difference := agree(settings, compare):
        raise AgreedError(f"{difference}; give all processes the same settings")


def check_examples(examples: PyTree) -> None:
    """Raises AgreedError in all processes if one has other examples than process 0."""
    if count() == 1:
        return
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(examples):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())

    def differing(digests: list[str]) -> list[int]:
        return [i for i, other in enumerate(digests) if other != digests[0]]

    if processes := agree(digest.hexdigest(), differing):
        raise AgreedError(
            f"process {processes[0]} has other examples than process 0; "
            "give all processes the same files"
        )


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields name and value of each setting; names in groups are like GROUP.NAME."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
