"""What a method's functions return, looked at by shapes before anything is compiled."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.groups import as_grouped, group_algorithms, has_groups
from fedjax_pfl.core.offload_check import (
    check_names,
    check_reads,
    check_writes,
    with_offloaded_shapes,
)

_WANTED = {
    "init": "State(server, rows, clients)",
    "train": "ClientResult(upload, variables, client, metrics)",
    "receive": "a tuple (server, rows)",
    "traffic": "Traffic(down, up)",
    "observe": "a dict of arrays by name",
}
_GIVEN = {
    "init": ("key",),
    "send": ("state", "ctx"),
    "train": ("payload", "client", "ctx"),
    "receive": ("state", "cohort"),
    "personalize": ("state", "client", "ctx"),
    "predict": ("variables", "x"),
    "traffic": ("payload", "upload"),
    "observe": ("state",),
}
_SEATS = 2


def check_shapes(
    name: str, algorithm: Algorithm, federation: Federation, data: FederatedData
) -> None:
    """Raise UsageError, one line, where a function does not keep the contract.

    What a function itself raises goes on as it is, with a note that says which it was.

    Args:
      name: of the method.
      data: of which only the shapes matter.
    """
    for part in group_algorithms(algorithm):
        for function, arguments in _GIVEN.items():
            _check_arguments(name, function, getattr(part, function), arguments)
    whole = as_grouped(algorithm)
    key, number = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)
    state = _called(name, "init", algorithm.init, key)
    _of_type(name, "init", state, State)
    state = _called(name, "init", whole.init, key)
    for part_name, stacks in (("rows", state.rows), ("clients", state.clients)):
        _check_stacked(name, part_name, stacks, federation.clients)
    seen = state._replace(clients=())
    cohorts = []
    for g, member in enumerate(group_algorithms(algorithm)):
        client = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), state.clients[g]
        )
        own = jax.eval_shape(client_data, data, number)
        payload = _called(name, "send", member.send, seen, ClientContext(number, None, number, key))
        ctx = ClientContext(number, own, number, key)
        trained = _called(name, "train", member.train, payload, client, ctx)
        _of_type(name, "train", trained, ClientResult)
        _same(name, "train", "client", trained.client, client, "init made")
        _check_metrics(name, trained.metrics)
        served = _called(name, "personalize", member.personalize, seen, client, ctx)
        for variables in (served, trained.variables):
            _check_outputs(name, member, variables, federation)
        bill = jax.eval_shape(partial(_bill, member), payload, trained.upload)
        _of_type(name, "traffic", bill, Traffic)
        cohorts.append(_cohort(payload, trained.upload))
    after = _called(name, "receive", whole.receive, seen, tuple(cohorts))
    if not isinstance(after, tuple) or len(after) != 2:
        _wrong(name, "receive", after)
    _same(name, "receive", "server", after[0], state.server, "init made")
    _same(name, "receive", "rows", after[1], state.rows, "init made")
    _of_type(name, "observe", _called(name, "observe", whole.observe, state), dict)
    if algorithm.offload and not has_groups(algorithm):
        check_names(name, algorithm.offload, state.rows)
        ctx, away = (
            ClientContext(number, None, number, key),
            with_offloaded_shapes(state.rows, algorithm.offload, _SEATS),
        )
        seen = seen._replace(rows=away)
        check_reads(name, "send", algorithm.send, seen, ctx)
        check_reads(
            name, "personalize", algorithm.personalize, seen, client, ctx._replace(data=own)
        )
        check_writes(name, algorithm.receive, seen, cohorts[0])
        whole_state = State(state.server, away, state.clients[0])
        check_reads(name, "observe", algorithm.observe, whole_state)


def _bill(member: Algorithm, payload: PyTree, upload: PyTree) -> Any:
    """Its amounts may be Python integers, which have no shape."""
    return jax.tree.map(jnp.asarray, member.traffic(payload, upload))


def _called(name: str, function: str, f: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return jax.eval_shape(f, *arguments)
    except UsageError:
        raise
    except Exception as error:
        error.add_note(f"raised in {function} of {name}")
        raise


def _check_arguments(name: str, function: str, f: Any, wanted: tuple[str, ...]) -> None:
    more = ", start=None" if function == "init" else ""
    try:
        inspect.signature(f).bind(*wanted)
    except TypeError:
        given = ", ".join(inspect.signature(f).parameters)
        raise UsageError(
            f"{name}: {function} takes ({given}); it must take ({', '.join(wanted)}{more})"
        ) from None
    except ValueError:  # it has no signature to look at
        return


def _what(value: Any) -> str:
    """A value in words."""
    if isinstance(value, tuple) and type(value) is not tuple:
        return f"a {type(value).__name__}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if hasattr(value, "shape"):
        return f"an array {_form(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _wrong(name: str, function: str, value: Any) -> NoReturn:
    raise UsageError(
        f"{name}: {function} returns {_what(value)}; it must return {_WANTED[function]}"
    )


def _of_type(name: str, function: str, value: Any, wanted: type) -> None:
    if not isinstance(value, wanted):
        _wrong(name, function, value)


def _leaves(tree: PyTree) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def _place(part: str, path: str) -> str:
    return f"{part}/{path}" if path else part


def _same(name: str, function: str, part: str, new: PyTree, old: PyTree, whence: str) -> None:
    """The part that a function returns has the shapes and dtypes of what came in."""
    got, wanted = _leaves(new), _leaves(old)
    for path in [*wanted, *got]:
        one, other = ("nothing" if path not in t else _form(t[path]) for t in (got, wanted))
        if one != other:
            raise UsageError(
                f"{name}: {function} returns {one} for {_place(part, path)}, where {whence} "
                f"{other}; shapes and dtypes must stay"
            )
    form: Any = jax.tree.structure(new)
    if form != jax.tree.structure(old):
        raise UsageError(
            f"{name}: {function} returns {_what(new)} for {part}, where {whence} {_what(old)}; "
            "the tree must stay"
        )


def _check_stacked(name: str, part: str, tree: PyTree, clients: int) -> None:
    for path, leaf in _leaves(tree).items():
        if leaf.shape[:1] != (clients,):
            raise UsageError(
                f"{name}: init returns {_form(leaf)} for {_place(part, path)}; its first axis must "
                f"be the {clients} clients, use trees.repeat(tree, federation.clients)"
            )


def _check_metrics(name: str, metrics: Any) -> None:
    if not isinstance(metrics, dict) or "loss" not in metrics:
        keys = f"{{{', '.join(metrics)}}}" if isinstance(metrics, dict) else _what(metrics)
        raise UsageError(
            f"{name}: train returns the metrics {keys}; they must be a dict of scalars with loss"
        )
    for key, value in metrics.items():
        if value.shape:
            raise UsageError(
                f"{name}: train returns {_form(value)} for the metric {key}; it must be a scalar"
            )


def _check_outputs(name: str, member: Algorithm, variables: PyTree, federation: Federation) -> None:
    x = jax.eval_shape(lambda: federation.examples(_SEATS))
    outputs = _called(name, "predict", member.predict, variables, x)
    wanted = (_SEATS, *federation.positions, federation.outputs)
    if getattr(outputs, "shape", None) != wanted:
        raise UsageError(
            f"{name}: predict returns {_what(outputs)} for {_SEATS} examples; it must return "
            f"{list(wanted)}, an output for each class or target"
        )


def _cohort(payload: PyTree, upload: PyTree) -> Cohort:
    def seats(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((_SEATS,), dtype)

    def stacked(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((_SEATS, *s.shape), s.dtype), tree)

    t = jax.ShapeDtypeStruct((), jnp.int32)
    ids, arrived, weights = seats(jnp.int32), seats(jnp.bool_), seats(jnp.float32)
    return Cohort(ids, arrived, weights, stacked(payload), stacked(upload), t)
