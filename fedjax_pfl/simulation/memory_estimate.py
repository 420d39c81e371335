"""About how much memory a compiled function takes, found without compiling it.

Values are counted as they are written down: XLA keeps fewer of them, because it fuses operations,
and allocates some more for copies and gaps. How the need grows with the clients that are vmapped
together shows all the same.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

# Their result takes the place of their first operand, where nobody needs that any more.
_IN_PLACE = ("scatter", "scatter-add", "dynamic_update_slice")


def peak(f: Callable[..., Any], *arguments: Any) -> int:
    """Bytes of the arguments and all values that live at once in f(*arguments), at the worst time.

    Arguments may be shapes. Those of a compiled function stay, unless it takes them as donated;
    those of a plain one are freed after their last use.
    """
    jaxpr = jax.make_jaxpr(f)(*arguments).jaxpr
    compiled = jaxpr.eqns[0].params.get("donated_invars") if len(jaxpr.eqns) == 1 else None
    return _peak(jaxpr, compiled or [True] * len(jaxpr.invars))


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves; shapes will do, and keys are two words each."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def gathered(f: Callable[..., Any], *arguments: Any) -> int:
    """Bytes that f's all-gathers put together on every device; of a loop those of one pass.

    What nobody uses is left out, as XLA does.
    """

    def within(jaxpr: Any) -> int:
        total = 0
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "all_gather":
                total += sum(_bytes(v.aval) for v in eqn.outvars)
            total += sum(map(within, core.jaxprs_in_params(eqn.params)))
        return total

    return within(jax.make_jaxpr(f)(*arguments).jaxpr)


def _bytes(value: Any) -> int:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return 8 * math.prod(value.shape)
    return int(np.dtype(value.dtype).itemsize) * math.prod(value.shape)


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}


def _peak(jaxpr: Any, owned: Sequence[bool]) -> int:
    """`owned`: inputs that are freed after their last use; others stay with the caller."""
    uses = Counter(v for eqn in jaxpr.eqns for v in _variables(eqn.invars))
    uses.update(_variables(jaxpr.outvars))
    uses.update(v for v, ours in zip(jaxpr.invars, owned, strict=True) if not ours)
    uses.update(jaxpr.constvars)
    size = {v: _bytes(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
    live = most = sum(size.values())
    for eqn in jaxpr.eqns:
        outputs = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
        size |= {v: _bytes(v.aval) for v in outputs}
        made = sum(size[v] for v in outputs)
        replaced = _variables(eqn.invars[:1]) if eqn.primitive.name in _IN_PLACE else set()
        taken = 0 if any(uses[v] == 1 for v in replaced) else made
        most = max(most, live + _needed(eqn, taken, uses))
        live += made
        for v in _variables(eqn.invars):
            uses[v] -= 1
        done = {v for v in (*_variables(eqn.invars), *outputs) if uses[v] == 0}
        live -= sum(size[v] for v in done)
    return most


def _needed(eqn: Any, made: int, uses: Counter[Any]) -> int:
    """What an operation needs beside its operands: results, and what goes on inside."""
    loop, most = eqn.primitive.name in ("while", "scan"), 0
    for inner in core.jaxprs_in_params(eqn.params):
        operands = eqn.invars[-len(inner.invars) :]
        last = [isinstance(v, core.Literal) or uses[v] == 1 for v in operands]
        owned = [True] * len(inner.invars) if loop or len(last) < len(inner.invars) else last
        most = max(most, _peak(inner, owned) - sum(_bytes(v.aval) for v in inner.invars))
    # A scan's stacked results are there all the time; other results are part of what is inside.
    stacked = _stacked(eqn) if eqn.primitive.name == "scan" else []
    return max(made if most == 0 else 0, most + sum(_bytes(v.aval) for v in stacked))


def _stacked(scan: Any) -> list[Any]:
    """A scan's results with an axis for its steps, without what it carries.

    They are told apart by shape, since JAX 0.11 names their numbers in another way than 0.10.
    """
    inside = scan.params["jaxpr"].jaxpr.outvars
    pairs = zip(scan.outvars, inside, strict=True)
    return [v for v, one in pairs if v.aval.ndim > one.aval.ndim]
