"""Operations on jaxprs, the programs that JAX traces. No other module uses JAX's own for them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import DropVar as DropVar
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Var as Var
from jax.interpreters import partial_eval

# Primitives that call a program once, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def prune(program: Jaxpr, is_wanted: Sequence[bool] | None = None) -> tuple[Jaxpr, list[bool]]:
    """Removes operations that no wanted result needs.

    Args:
      program: The program.
      is_wanted: For each result, whether it is wanted. Default: all.

    Returns:
      The program with only the used arguments, and for each original argument whether it is used.
    """
    output_mask = [True] * len(program.outvars) if is_wanted is None else list(is_wanted)
    pruned, is_used = partial_eval.dce_jaxpr(program, output_mask)
    return pruned, is_used


def inner_programs(equation: Any) -> Iterator[Jaxpr]:
    """Yields the jaxprs in the parameters of an equation, such as the body of a loop."""
    yield from core.jaxprs_in_params(equation.params)


def depends_on(f: Callable[..., Any], argument: Any, *others: Any) -> bool:
    """Returns True if f(argument, *others) depends on a leaf of `argument`.

    `f` returns a tree and is only traced. The arguments are trees of arrays or shapes.
    """
    leaves, structure = jax.tree.flatten((argument, others))

    def flat(*leaves: Any) -> list[Any]:
        argument, others = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(f(argument, *others))

    _, is_used = prune(jax.make_jaxpr(flat)(*leaves).jaxpr)
    return any(is_used[: len(jax.tree.leaves(argument))])


def with_used_arguments(
    f: Callable[..., list[Any]], shapes: Sequence[Any]
) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Returns a jitted function that computes f from only the arguments that it depends on.

    Args:
      f: Function of arrays; returns a list of arrays.
      shapes: Shape and dtype of each argument, such as `jax.ShapeDtypeStruct`.

    Returns:
      fetch -> results of f, where `fetch` maps k to argument k, an array.
    """
    closed = jax.make_jaxpr(f)(*shapes)
    pruned, is_used = prune(closed.jaxpr)
    compiled = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(pruned, closed.consts)))
    return lambda fetch: compiled(*(fetch(k) for k, used in enumerate(is_used) if used))


def interpret(
    program: Jaxpr,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    operation: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda array: array,
) -> list[Any]:
    """Runs a program on values of any type and returns the values of its results.

    Programs of jit, checkpoint and custom derivatives are run too; a loop is one operation.

    Args:
      program: The program.
      constants: Value of each of its constants (`program.constvars`).
      arguments: Value of each of its arguments.
      operation: (equation, operands) -> results. Operations whose results are unused are skipped.
      constant: Turns a literal, or a constant of a called program, into a value.
    """
    with_constants = program.replace(constvars=[], invars=[*program.constvars, *program.invars])
    pruned, is_used = prune(with_constants)
    pairs = zip((*constants, *arguments), is_used, strict=True)
    values = dict(zip(pruned.invars, (value for value, used in pairs if used), strict=True))

    def read(variable: Any) -> Any:
        return constant(variable.val) if isinstance(variable, Literal) else values[variable]

    for equation in pruned.eqns:
        operands = [read(variable) for variable in equation.invars]
        inner = equation.params.get(_CALLS.get(equation.primitive.name, ""))
        if inner is None:
            results = operation(equation, operands)
        else:
            inner_constants = [constant(array) for array in getattr(inner, "consts", ())]
            inner_program = getattr(inner, "jaxpr", inner)
            results = interpret(inner_program, inner_constants, operands, operation, constant)
        values |= zip(equation.outvars, results, strict=True)
    return [read(variable) for variable in pruned.outvars]


def compute(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Computes an equation of a jaxpr. Returns its results, a list, given arrays as operands."""
    primitive = equation.primitive
    with equation.ctx.manager:
        results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]
