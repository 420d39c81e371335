"""Checks that a method reads and writes its offloaded rows only in the permitted ways."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import jaxprs, offload
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.core.errors import UsageError


def with_offloaded_shapes(rows: PyTree, names: Sequence[str], cohort_size: int) -> PyTree:
    """Returns the shapes of rows, with the named parts as `Offloaded` leaves.

    `names` are fields or keys of the rows. Each leaf has `cohort_size` rows to write.
    """
    no_source: Any = object()  # programs are traced and never run
    other_rows, parts = offload.split_parts(rows, names)
    leaves, structure = jax.tree.flatten(parts)
    ids = jax.ShapeDtypeStruct((cohort_size,), jnp.int32)
    offloaded = [
        offload.Offloaded(
            source=no_source,
            k=k,
            shape=x.shape,
            dtype=x.dtype,
            ids=ids,
            values=jax.ShapeDtypeStruct((cohort_size, *x.shape[1:]), x.dtype),
        )
        for k, x in enumerate(leaves)
    ]
    return offload.join_parts(other_rows, jax.tree.unflatten(structure, offloaded))


def check_names(method: str, names: Sequence[str], rows: PyTree) -> None:
    """Raises UsageError, naming the method, if `rows` lack a field or key in `names`."""
    parts = list(rows) if isinstance(rows, dict) else list(getattr(rows, "_fields", ()))
    for name in names:
        if name not in parts:
            existing = ", ".join(parts) or "no named parts; use a dict or a NamedTuple"
            raise UsageError(f"{method}: offload names {name}, and rows have {existing}")


def check_reads(
    method: str, function: str, f: Callable[..., Any], state: State, *arguments: Any
) -> None:
    """Raises UsageError if f(state, *arguments) reads offloaded rows as arrays or returns them.

    `jax.tree` shows only the pending writes of an offloaded leaf, no rows.
    `f` is only traced; arguments are shapes. `method` and `function` are names for the message.
    """
    leaves, structure = jax.tree.flatten((state, arguments))
    offloaded = offload.offloaded_leaves(state.rows)
    pending_writes = {id(x) for leaf in offloaded for x in (leaf.ids, leaf.values)}
    error = UsageError(
        f"{method}: {function} reads offloaded rows; use trees.row, offload.weighted_sum or "
        "offload.map_clients"
    )

    def traced(*flat: Any) -> list[Any]:
        state, others = jax.tree.unflatten(structure, flat)
        result = f(state, *others)
        if offload.offloaded_leaves(result):
            raise error
        return jax.tree.leaves(result)

    _, used = jaxprs.prune(jax.make_jaxpr(traced)(*leaves).jaxpr)
    if any(use and id(leaf) in pending_writes for use, leaf in zip(used, leaves, strict=True)):
        raise error


def check_writes(method: str, receive: Callable[..., Any], state: State, cohort: PyTree) -> None:
    """Raises UsageError if `receive` replaces offloaded rows other than by `Cohort.put`.

    `receive` is only traced; `state`, with `Offloaded` leaves in `rows`, and `cohort` are shapes.
    """
    _, rows = jax.eval_shape(receive, state, cohort)
    if len(offload.offloaded_leaves(rows)) != len(offload.offloaded_leaves(state.rows)):
        raise UsageError(f"{method}: receive replaces offloaded rows; write them with cohort.put")
