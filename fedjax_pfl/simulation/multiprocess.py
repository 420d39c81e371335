"""Several processes that compute one run: process 0 reads, writes and decides, all compute.

Each of them has the same settings, examples and state; what could differ is asked here. With one
process, nothing here does anything. They are connected by `jax.distributed.initialize`.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # its store of keys and values has no public name
from jax.experimental import multihost_utils

from fedjax_pfl.core.errors import UsageError

PyTree = Any


class AgreedError(UsageError):
    """One that all processes have come to."""


_PATIENCE = 2**31 - 1  # milliseconds; one that dies in the meantime is noticed by its heartbeat
_questions = itertools.count()


def count() -> int:
    """How many processes compute this run."""
    return global_state.num_processes


def lead() -> bool:
    """Whether this process is the one that reads, writes and speaks."""
    return global_state.process_id == 0


def _the_first(each: list[Any]) -> Any:
    return each[0]


def agree(mine: Any, decide: Callable[[list[Any]], Any] = _the_first) -> Any:
    """What process 0 decides on plain data of each process; all wait until all have called this."""
    if count() == 1:
        return decide([mine])
    store, number = global_state.client, next(_questions)
    assert store is not None
    question = f"fedjax_pfl/{number}"
    store.key_value_set(f"{question}/{global_state.process_id}", json.dumps(mine))

    def said(name: Any) -> Any:
        return json.loads(store.blocking_key_value_get(f"{question}/{name}", _PATIENCE))

    if not lead():
        return said("answer")
    answer = decide([said(i) for i in range(count())])
    store.key_value_set(f"{question}/answer", json.dumps(answer))
    if number:  # all that ask this have read the answer to the one before
        store.key_value_delete(f"fedjax_pfl/{number - 1}")
    return answer


def broadcast(tree: PyTree) -> PyTree:
    """Process 0's arrays in all of them, bit for bit; the others give any of the same shapes."""
    if count() == 1:
        return tree
    whole = jax.tree.map(np.asarray, tree)
    # As bytes, because it adds them up, and -0.0 + 0.0 is 0.0.
    sent = multihost_utils.broadcast_one_to_all(
        jax.tree.map(lambda a: np.ascontiguousarray(a).reshape(-1).view(np.uint8), whole)
    )
    return jax.tree.map(lambda a, b: np.array(b).view(a.dtype).reshape(a.shape), whole, sent)


def put(tree: PyTree, everywhere: jax.sharding.Sharding) -> PyTree:
    """What every process has, on all devices; `jax.device_put` would first compare all of it."""
    if everywhere.is_fully_addressable:
        return jax.device_put(tree, everywhere)

    def whole(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            bits = whole(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, everywhere, lambda part: host[part])

    return jax.tree.map(whole, tree)


def devices(most: int | None) -> Sequence[jax.Device]:
    """Those that a run uses: all, or `most`, of which each process has the same number."""
    found = jax.devices()
    if most is None:
        return found
    own, left = divmod(most, count())
    if left:
        raise UsageError(f"devices is {most}, and there are {count()} processes; take a multiple")
    by_process = [[d for d in found if d.process_index == i] for i in range(count())]
    chosen = [d for devices in by_process for d in devices[:own]]
    if len(chosen) < most:
        where = "this machine shows" if count() == 1 else f"the {count()} processes show"
        raise UsageError(f"devices is {most}, and {where} {len(found)}")
    return chosen


def check_settings(settings: Mapping[str, Any], own: Iterable[str] = ()) -> None:
    """Raises UsageError in all processes if one has other settings than process 0.

    Args:
      settings: Settings of this process as plain data.
      own: Names of settings that may differ between processes.
    """
    skipped = set(own)

    def compare(each: list[Any]) -> str:
        first = dict(_flat(each[0]))
        for i, other in enumerate(dict(_flat(settings)) for settings in each):
            for key in sorted({*first, *other} - skipped):
                one, two = (values.get(key, "nothing") for values in (first, other))
                if one != two and (one == one or two == two):  # NaN is named by a later check
                    return f"{key} is {one!r} in process 0 and {two!r} in process {i}"
        return ""

    if wrong := agree(settings, compare):
        raise AgreedError(f"{wrong}; give all processes the same settings")


def check_examples(examples: PyTree) -> None:
    """UsageError in all of them where one has other examples than process 0."""
    if count() == 1:
        return
    seen = hashlib.sha256()
    for leaf in jax.tree.leaves(examples):
        array = np.asarray(leaf)
        seen.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())

    def others(digests: list[str]) -> list[int]:
        return [i for i, digest in enumerate(digests) if digest != digests[0]]

    if wrong := agree(seen.hexdigest(), others):
        raise AgreedError(
            f"process {wrong[0]} has other examples than process 0; give all of them the same files"
        )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
