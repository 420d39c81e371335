"""Memory estimates of functions, from their jaxpr and without compiling them.

Every value of the jaxpr that a result needs counts. XLA keeps fewer values, because it fuses
operations, and allocates some bytes for copies and gaps. The estimate shows how memory grows with
the clients that are vmapped together.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core import jaxprs

# The result takes the memory of the first operand if nothing else uses that operand.
_IN_PLACE = ("scatter", "scatter-add", "dynamic_update_slice")


def peak_bytes(f: Callable[..., Any], *arguments: Any) -> int:
    """Estimates the peak memory of f(*arguments) in bytes, arguments included.

    Arguments of a compiled function are live until the end, unless they are donated. Arguments of
    a function that is not compiled are freed after their last use.

    Args:
      f: The function; it is traced and not computed.
      *arguments: Trees of arrays or shapes.
    """
    unpruned = jax.make_jaxpr(f)(*arguments).jaxpr
    is_freed = [True] * len(unpruned.invars)
    if len(unpruned.eqns) == 1:
        is_freed = unpruned.eqns[0].params.get("donated_invars", is_freed)
    jaxpr, is_used = jaxprs.prune(unpruned)
    unused = [v for v, used in zip(unpruned.invars, is_used, strict=True) if not used]
    freed = [freed for freed, used in zip(is_freed, is_used, strict=True) if used]
    return sum(_bytes(v.aval) for v in unused) + _peak(jaxpr, freed)


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all leaves, arrays or shapes. A PRNG key has 8 bytes."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def all_gather_bytes(f: Callable[..., Any], *arguments: Any) -> int:
    """Returns the bytes that the all-gathers of f(*arguments) produce on every device.

    A loop counts as one pass. All-gathers whose result is unused do not count, as in XLA. The
    arguments are trees of arrays or shapes.
    """

    def count(jaxpr: Any) -> int:
        """Returns the bytes of the all-gathers of a jaxpr and of those inside it."""
        total = 0
        jaxpr, _ = jaxprs.prune(jaxpr)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "all_gather":
                total += sum(_bytes(v.aval) for v in eqn.outvars)
            total += sum(map(count, jaxprs.inner_programs(eqn)))
        return total

    return count(jax.make_jaxpr(f)(*arguments).jaxpr)


def _bytes(value: Any) -> int:
    """Returns the bytes of an array, or of a shape with a dtype."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return 8 * math.prod(value.shape)
    return int(np.dtype(value.dtype).itemsize) * math.prod(value.shape)


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, jaxprs.Literal)}


def _peak(jaxpr: Any, is_freed: Sequence[bool]) -> int:
    """Returns the peak bytes of a jaxpr.

    Args:
      jaxpr: The program.
      is_freed: For each input, True if it is freed after its last use.
    """
    uses = Counter(v for eqn in jaxpr.eqns for v in _variables(eqn.invars))
    uses.update(_variables(jaxpr.outvars))
    uses.update(v for v, freed in zip(jaxpr.invars, is_freed, strict=True) if not freed)
    uses.update(jaxpr.constvars)
    size = {v: _bytes(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
    live = peak = sum(size.values())
    for eqn in jaxpr.eqns:
        outputs = [v for v in eqn.outvars if not isinstance(v, jaxprs.DropVar)]
        size |= {v: _bytes(v.aval) for v in outputs}
        output_bytes = sum(size[v] for v in outputs)
        replaced = _variables(eqn.invars[:1]) if eqn.primitive.name in _IN_PLACE else set()
        allocated = 0 if any(uses[v] == 1 for v in replaced) else output_bytes
        peak = max(peak, live + _operation_bytes(eqn, allocated, uses))
        live += output_bytes
        for v in _variables(eqn.invars):
            uses[v] -= 1
        unused = {v for v in (*_variables(eqn.invars), *outputs) if uses[v] == 0}
        live -= sum(size[v] for v in unused)
    return peak


def _operation_bytes(eqn: Any, output_bytes: int, uses: Counter[Any]) -> int:
    """Returns the bytes of an operation's results and inner values, without its operands.

    Args:
      eqn: The operation, an equation of a jaxpr.
      output_bytes: Bytes to allocate for its results.
      uses: For each variable, how often it is still used, this operation included.
    """
    is_loop, peak = eqn.primitive.name in ("while", "scan"), 0
    for inner in jaxprs.inner_programs(eqn):
        # A branch without operands, such as of a cond on the round, has none.
        operands = eqn.invars[max(0, len(eqn.invars) - len(inner.invars)) :]
        is_last = [isinstance(v, jaxprs.Literal) or uses[v] == 1 for v in operands]
        all_freed = is_loop or len(is_last) < len(inner.invars)
        is_freed = [True] * len(inner.invars) if all_freed else is_last
        peak = max(peak, _peak(inner, is_freed) - sum(_bytes(v.aval) for v in inner.invars))
    # Stacked results of a scan are live during all steps. Other results are counted inside.
    stacked = _stacked(eqn) if eqn.primitive.name == "scan" else []
    return max(output_bytes if peak == 0 else 0, peak + sum(_bytes(v.aval) for v in stacked))


def _stacked(scan: Any) -> list[Any]:
    """Returns the results of a scan, an equation of a jaxpr, that have an axis of steps.

    The carry has none. Compares ranks, because JAX 0.10 and 0.11 name the parameter with the number
    of these results differently.
    """
    step_results = scan.params["jaxpr"].jaxpr.outvars
    pairs = zip(scan.outvars, step_results, strict=True)
    return [v for v, step_result in pairs if v.aval.ndim > step_result.aval.ndim]
