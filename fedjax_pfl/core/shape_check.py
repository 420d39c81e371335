"""Checks of a method's functions by the shapes that they return, before anything is compiled."""

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

_RESULTS = {
    "init": "State(server, rows, clients)",
    "train": "ClientResult(upload, variables, client, metrics)",
    "receive": "a tuple (server, rows)",
    "traffic": "Traffic(down, up)",
    "observe": "a dict of arrays by name",
}
_ARGUMENTS = {
    "init": ("key", "start"),
    "send": ("state", "ctx"),
    "train": ("payload", "client", "ctx"),
    "receive": ("state", "cohort"),
    "personalize": ("state", "client", "ctx"),
    "predict": ("variables", "x"),
    "traffic": ("payload", "upload"),
    "observe": ("state",),
}
_COHORT_SIZE = 2


def check_shapes(
    name: str, algorithm: Algorithm, federation: Federation, data: FederatedData
) -> None:
    """Raises UsageError if a function of a method breaks the contract of `Algorithm`.

    Exceptions of the functions themselves are passed on with a note that names the function.

    Args:
      name: Name of the method, for messages.
      algorithm: The method.
      federation: The federation that the method was built for.
      data: Data of the federation; only shapes and dtypes are used.
    """
    algorithms, grouped = group_algorithms(algorithm), as_grouped(algorithm)
    for group_algorithm in algorithms:
        for function, arguments in _ARGUMENTS.items():
            _check_arguments(name, function, getattr(group_algorithm, function), arguments)
    key, number = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)
    send_ctx = ClientContext(i=number, data=None, t=number, key=key)
    ctx = send_ctx._replace(data=jax.eval_shape(client_data, data, number))

    state = _trace(name, "init", algorithm.init, key)
    _check_type(name, "init", state, State)
    _check_no_keys(name, "init", state)
    state = _trace(name, "init", grouped.init, key)
    for part_name, part in (("rows", state.rows), ("clients", state.clients)):
        _check_stacked(name, part_name, part, federation.clients)
    server_state = state._replace(clients=())
    cohorts = []
    for group_algorithm, clients in zip(algorithms, state.clients, strict=True):
        client = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), clients)
        payload = _trace(name, "send", group_algorithm.send, server_state, send_ctx)
        _check_no_keys(name, "send", payload)
        result = _trace(name, "train", group_algorithm.train, payload, client, ctx)
        _check_type(name, "train", result, ClientResult)
        _check_no_keys(name, "train", result.upload)
        _check_unchanged(name, "train", "client", result.client, client)
        _check_metrics(name, result.metrics)
        personalize = group_algorithm.personalize
        variables = _trace(name, "personalize", personalize, server_state, client, ctx)
        _check_outputs(name, group_algorithm, variables, federation)
        _check_outputs(name, group_algorithm, result.variables, federation)
        counted = partial(_traffic, group_algorithm)
        traffic = _trace(name, "traffic", counted, payload, result.upload)
        _check_type(name, "traffic", traffic, Traffic)
        for direction, layers in traffic._asdict().items():
            _check_arrays(name, "traffic", f"the layers of {direction}", layers, is_scalar=True)
        cohorts.append(_cohort(payload, result.upload))
    received = _trace(name, "receive", grouped.receive, server_state, tuple(cohorts))
    if not isinstance(received, tuple) or len(received) != 2:
        _raise_wrong_result(name, "receive", received)
    _check_unchanged(name, "receive", "server", received[0], state.server)
    _check_unchanged(name, "receive", "rows", received[1], state.rows)
    observed = _trace(name, "observe", grouped.observe, state)
    _check_type(name, "observe", observed, dict)

    if algorithm.offload and not has_groups(algorithm):
        check_names(name, algorithm.offload, state.rows)
        rows = with_offloaded_shapes(state.rows, algorithm.offload, _COHORT_SIZE)
        server_state = server_state._replace(rows=rows)
        check_reads(name, "send", algorithm.send, server_state, send_ctx)
        check_reads(name, "personalize", algorithm.personalize, server_state, client, ctx)
        check_writes(name, algorithm.receive, server_state, cohorts[0])
        full_state = State(server=state.server, rows=rows, clients=state.clients[0])
        check_reads(name, "observe", algorithm.observe, full_state)
    _check_arrays(name, "observe", "the arrays", observed)


def _traffic(algorithm: Algorithm, payload: PyTree, upload: PyTree) -> Any:
    """Returns the traffic as arrays; amounts may be Python integers, which have no shape."""
    return jax.tree.map(jnp.asarray, algorithm.traffic(payload, upload))


def _trace(name: str, function: str, f: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the shapes of f(*arguments). Exceptions get a note that names method and function.

    `name` is that of the method, `function` the field of `Algorithm`.
    """
    try:
        return jax.eval_shape(f, *arguments)
    except UsageError:
        raise
    except Exception as error:
        error.add_note(f"raised in {function} of {name}")
        raise


def _check_arguments(name: str, function: str, f: Any, arguments: tuple[str, ...]) -> None:
    """Raises UsageError if `f` cannot be called with positional arguments of these names.

    `name` and `function` are the method and the field of `Algorithm`, for the message.
    """
    try:
        inspect.signature(f).bind(*arguments)
    except TypeError:
        parameters = ", ".join(inspect.signature(f).parameters)
        required = ", ".join(arguments) + "=None" * (function == "init")
        raise UsageError(
            f"{name}: {function} takes ({parameters}); it must take ({required})"
        ) from None
    except ValueError:  # f has no signature
        return


def _describe(value: Any) -> str:
    """Returns the type of a value in words, such as "a tuple of 2"."""
    if isinstance(value, tuple) and type(value) is not tuple:
        return f"a {type(value).__name__}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if hasattr(value, "shape"):
        return f"an array {_array_type(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _array_type(leaf: Any) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _raise_wrong_result(name: str, function: str, value: Any) -> NoReturn:
    """Raises UsageError that says what `function` of method `name` must return, not `value`."""
    raise UsageError(
        f"{name}: {function} returns {_describe(value)}; it must return {_RESULTS[function]}"
    )


def _check_type(name: str, function: str, value: Any, required: type) -> None:
    """Raises UsageError if the result of a function has another type than required."""
    if not isinstance(value, required):
        _raise_wrong_result(name, function, value)


def _leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by path, such as "params/Dense_0/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _full_path(part: str, path: str) -> str:
    return f"{part}/{path}" if path else part


def _check_no_keys(name: str, function: str, tree: PyTree) -> None:
    """Raises UsageError for random keys in a state or a message, which have no bytes."""
    for path, leaf in _leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UsageError(
                f"{name}: {function} returns a random key at {path}, which can be neither sent nor "
                "saved; use jax.random.key_data and jax.random.wrap_key_data"
            )


def _check_unchanged(name: str, function: str, part: str, new: PyTree, old: PyTree) -> None:
    """Raises UsageError if a part of the state changes its structure, shapes or dtypes.

    `new` is what `function` returned for the part (server, rows or client), `old` what `init` did.
    """
    new_leaves, old_leaves = _leaves(new), _leaves(old)
    for path in [*old_leaves, *new_leaves]:
        new_type, old_type = (
            "nothing" if path not in leaves else _array_type(leaves[path])
            for leaves in (new_leaves, old_leaves)
        )
        if new_type != old_type:
            raise UsageError(
                f"{name}: {function} returns {new_type} for {_full_path(part, path)}, but init "
                f"returned {old_type}; shapes and dtypes must not change"
            )
    structure: Any = jax.tree.structure(new)
    if structure != jax.tree.structure(old):
        raise UsageError(
            f"{name}: {function} returns {_describe(new)} for {part}, but init returned "
            f"{_describe(old)}; the tree structure must not change"
        )


def _check_stacked(name: str, part: str, tree: PyTree, clients: int) -> None:
    """Raises UsageError if a leaf of `tree`, which `init` returned, is not [clients, ...].

    `name` and `part` (rows or clients) are for the message.
    """
    for path, leaf in _leaves(tree).items():
        if leaf.shape[:1] != (clients,):
            raise UsageError(
                f"{name}: init returns {_array_type(leaf)} for {_full_path(part, path)}; its "
                f"first axis must be the {clients} clients, use trees.repeat(tree, "
                "federation.clients) and build the method with data.federation"
            )


def _check_metrics(name: str, metrics: Any) -> None:
    """Raises UsageError unless metrics that `train` returned are a dict of scalars with `loss`.

    `name` is that of the method, for the message.
    """
    if not isinstance(metrics, dict) or "loss" not in metrics:
        keys = f"{{{', '.join(map(str, metrics))}}}" if isinstance(metrics, dict) else ""
        raise UsageError(
            f"{name}: train returns the metrics {keys or _describe(metrics)}; they must be a dict "
            "of scalars with loss"
        )
    _check_arrays(name, "train", "the metrics", metrics, is_scalar=True)


def _check_arrays(
    name: str, function: str, part: str, result: Any, *, is_scalar: bool = False
) -> None:
    """Raises UsageError unless a result is a dict of arrays, or of scalars, whose keys are text.

    `name` and `function` are the method and the field of `Algorithm`; `part` describes the result.
    """
    if not isinstance(result, dict) or not all(isinstance(key, str) for key in result):
        raise UsageError(
            f"{name}: {function} returns {_describe(result)} for {part}; it must be a dict whose "
            "keys are text"
        )
    required = "a scalar" if is_scalar else "an array"
    for key, value in result.items():
        if not hasattr(value, "shape") or (is_scalar and value.shape):
            raise UsageError(
                f"{name}: {function} returns {_describe(value)} for {key} of {part}; it must be "
                f"{required}"
            )


def check_outputs(
    name: str, algorithm: Algorithm, federation: Federation, data: FederatedData
) -> None:
    """Raises UsageError if a personalised model lacks an output for a class or target.

    Raises it also for state of another number of clients. The arguments are those of
    `check_shapes`.
    """
    key, number = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)
    ctx = ClientContext(i=number, data=jax.eval_shape(client_data, data, number), t=number, key=key)
    state = jax.eval_shape(as_grouped(algorithm).init, key)
    for part_name, part in (("rows", state.rows), ("clients", state.clients)):
        _check_stacked(name, part_name, part, federation.clients)
    for member, clients in zip(group_algorithms(algorithm), state.clients, strict=True):
        client = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), clients)
        server_state = state._replace(clients=())
        variables = jax.eval_shape(member.personalize, server_state, client, ctx)
        _check_outputs(name, member, variables, federation)


def _check_outputs(
    name: str, algorithm: Algorithm, variables: PyTree, federation: Federation
) -> None:
    """Raises UsageError if `predict`, with these variables, lacks an output for a class or target.

    `algorithm` is that of one group. `name` is the method's, for the message.
    """
    x = jax.eval_shape(lambda: federation.examples(_COHORT_SIZE))
    outputs = _trace(name, "predict", algorithm.predict, variables, x)
    required = (_COHORT_SIZE, *federation.output_shape)
    if getattr(outputs, "shape", None) != required:
        raise UsageError(
            f"{name}: predict returns {_describe(outputs)} for {_COHORT_SIZE} examples; it must "
            f"return {list(required)}, an output for each class or target"
        )


def _cohort(payload: PyTree, upload: PyTree) -> Cohort:
    """Returns the shapes of a cohort of two clients, from those of one payload and upload."""

    def vector(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((_COHORT_SIZE,), dtype)

    def stack(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((_COHORT_SIZE, *s.shape), s.dtype), tree)

    return Cohort(
        ids=vector(jnp.int32),
        arrived=vector(jnp.bool_),
        weights=vector(jnp.float32),
        payloads=stack(payload),
        uploads=stack(upload),
        t=jax.ShapeDtypeStruct((), jnp.int32),
        key=jax.eval_shape(jax.random.key, 0),
    )
