"""Whether a method reads the parts of its rows that it calls far as they may be read."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from fedjax_pfl.core import far
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.core.errors import UsageError


def elsewhere(rows: PyTree, names: Sequence[str], number: int) -> PyTree:
    """Rows, of which only shapes matter, with the parts that are named off the devices."""
    nowhere: Any = object()  # programs are looked at, and not computed
    rest, parts = far.separate(rows, names)
    leaves, form = jax.tree.flatten(parts)
    none = jax.ShapeDtypeStruct((number,), jnp.int32)
    made = [
        far.Far(
            nowhere,
            k,
            x.shape,
            x.dtype,
            none,
            jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype),
        )
        for k, x in enumerate(leaves)
    ]
    return far.joined(rest, jax.tree.unflatten(form, made))


def check_names(name: str, names: Sequence[str], rows: PyTree) -> None:
    """UsageError where rows have no such parts."""
    there = list(rows) if isinstance(rows, dict) else list(getattr(rows, "_fields", ()))
    for one in names:
        if one not in there:
            parts = ", ".join(there) or "no parts by name; use a dict or a NamedTuple"
            raise UsageError(f"{name}: far names {one}, and rows have {parts}")


def check_reads(
    name: str, function: str, f: Callable[..., Any], state: State, *arguments: Any
) -> None:
    """UsageError where f(state, *arguments) reads far rows in another way, or returns them.

    What `jax.tree` shows of their leaves is what is to be written, and no row.
    """
    leaves, form = jax.tree.flatten((state, arguments))
    shown = {id(x) for leaf in far.leaves_of(state.rows) for x in (leaf.ids, leaf.values)}
    wrong = UsageError(
        f"{name}: {function} reads rows that are far by more than trees.row, far.mixed and far.each"
    )

    def called(*flat: Any) -> list[Any]:
        state, others = jax.tree.unflatten(form, flat)
        found = f(state, *others)
        if far.leaves_of(found):
            raise wrong
        return jax.tree.leaves(found)

    closed = jax.make_jaxpr(called)(*leaves)
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    if any(use and id(leaf) in shown for use, leaf in zip(used, leaves, strict=True)):
        raise wrong


def check_writes(name: str, f: Callable[..., Any], state: State, cohort: PyTree) -> None:
    """UsageError where `receive` returns far rows that `Cohort.put` has not made."""
    _, rows = jax.eval_shape(f, state, cohort)
    if len(far.leaves_of(rows)) != len(far.leaves_of(state.rows)):
        raise UsageError(f"{name}: receive writes rows that are far by more than cohort.put")
