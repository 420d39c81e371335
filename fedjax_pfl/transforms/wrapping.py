"""Tools for writing transforms, and `chain`, which applies them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.groups import (
    as_grouped,
    as_single_group,
    group_algorithms,
    has_groups,
    unwrap_clients,
    wrap_clients,
)
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.core.setting import Setting

Transform = Callable[[Algorithm], Algorithm]


class TransformContext(NamedTuple):
    """Network, federation and data of a phase, from which a transform is made.

    `registry` has factories by setting and value, such as registry["server_optimizer"]["adam"].
    """

    model: Any  # network of the first architecture group
    federation: Federation
    data: FederatedData  # only its shapes matter
    registry: Mapping[str, Mapping[str, Any]]
    training: Training | None = None  # local training that the method was made from


class Statement(NamedTuple):
    """What a run states about a transform."""

    line: str  # printed before the run
    metrics: Callable[[int], dict[str, float | None]]  # finished rounds -> for metrics.jsonl
    fixed_length: str = ""  # why more rounds would change the finished ones, or ""


def _no_statement(value_of: Callable[[str], Any], federation: Federation) -> Statement | None:
    return None


def _same_training(
    value_of: Callable[[str], Any], federation: Federation, training: Training
) -> Training:
    return training


class Selectable(NamedTuple):
    """A transform that settings can select.

    `value_of` returns the value of a setting by its name.

    make   (value_of, context) -> the transform, or None if the settings do not select it.
    state  (value_of, federation) -> what a run states about it, or None.
    train  (value_of, federation, training) -> the local training that the method is made from.
    """

    title: str  # heading under which its settings are listed
    settings: Mapping[str, Setting]  # its settings, by name
    make: Callable[[Callable[[str], Any], TransformContext], Transform | None]
    state: Callable[[Callable[[str], Any], Federation], Statement | None] = _no_statement
    train: Callable[[Callable[[str], Any], Federation, Training], Training] = _same_training


class RoundShapes(NamedTuple):
    """Shapes and dtypes of one client's round."""

    state: State  # of all clients, before the round
    payload: PyTree  # download
    upload: PyTree  # upload
    variables: PyTree  # variables of the model that the client trained


def round_shapes(algorithm: Algorithm, data: FederatedData) -> RoundShapes:
    """Returns the shapes of one client's round under an algorithm without groups."""
    key, i = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)

    def run(key: jax.Array, i: jax.Array, data: FederatedData) -> RoundShapes:
        state = algorithm.init(key)
        payload = algorithm.send(
            state._replace(clients=()), ClientContext(i=i, data=None, t=i, key=key)
        )
        ctx = ClientContext(i=i, data=client_data(data, i), t=i, key=key)
        result = algorithm.train(payload, trees.row(state.clients, i), ctx)
        return RoundShapes(
            state=state, payload=payload, upload=result.upload, variables=result.variables
        )

    return jax.eval_shape(run, key, i, data)


def keep_layers(upload: PyTree, changed: PyTree, layers: Collection[str]) -> PyTree:
    """Returns the `changed` upload with the values of `upload` in the named layers.

    They are private layers, which are never sent, so nothing may depend on noise in them.
    """

    def choose(layer: str, old: jax.Array, new: jax.Array) -> jax.Array:
        return old if layer in layers else new

    return trees.map_layers(choose, upload, changed)


def is_variance(path: tuple[Any, ...]) -> bool:
    """Returns True for the path of a variance of BatchNorm, which must not become negative."""
    names = [getattr(entry, "key", None) for entry in path]
    return "batch_stats" in names and names[-1] == "var"


def check_single_model(setting: str, algorithm: Algorithm, data: FederatedData) -> None:
    """Raises UsageError if server, payload and upload are not one model, or there are rows.

    Args:
      setting: Setting that selects the transform, for the message.
      algorithm: The algorithm that the transform wraps.
      data: Examples; only their shapes matter.
    """
    if has_groups(algorithm):
        raise UsageError(f"{setting} is for one architecture; use it without groups")
    shapes = round_shapes(algorithm, data)
    server = without_records(shapes.state.server)
    is_model = isinstance(server, Mapping) and "params" in server
    if not (
        is_model
        and not jax.tree.leaves(shapes.state.rows)  # the transform would not see their update
        and trees.same_shapes(server, shapes.payload)
        and trees.same_shapes(server, shapes.upload)
    ):
        raise UsageError(
            f"{setting} is for methods whose server makes one model of the models that "
            "clients upload, such as fedavg, and this method does not; leave it off"
        )


def chain(algorithm: Algorithm, *transforms: Transform) -> Algorithm:
    """Returns the algorithm wrapped in transforms, the first one innermost.

    `start`, the state of an earlier phase, may contain records of its transforms: NamedTuples whose
    first field is `method`. The `init` of the method gets it without them.
    """
    inner = algorithm

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is None:
            return inner.init(key)
        clients = tuple(map(without_records, wrap_clients(inner, start).clients))
        method_state = State(without_records(start.server), start.rows, clients)
        return inner.init(key, unwrap_clients(inner, method_state))

    algorithm = inner._replace(init=init)
    for transform in transforms:
        algorithm = transform(algorithm)
    return algorithm


def without_records(part: PyTree) -> PyTree:
    """Returns the innermost field `method` of nested records of transforms, or else the part."""
    while getattr(part, "_fields", ())[:1] == ("method",):
        part = part.method
    return part


def with_method_state(part: PyTree, state: PyTree) -> PyTree:
    """Returns nested records of transforms with another state of the method in the innermost one.

    Args:
      part: Server-side or client-side state of a method, in any number of records.
      state: New state of the method.
    """
    if part is without_records(part):
        return state
    return part._replace(method=with_method_state(part.method, state))


def with_server_state(
    algorithm: Algorithm,
    record: Any,
    first: Callable[[PyTree], Any],
    receive: Callable[[Any, State, Cohort], tuple[Any, PyTree]],
    observe: Callable[[Any], dict[str, jax.Array]] = lambda record: {},
) -> Algorithm:
    """Returns an algorithm whose server also keeps state of a transform.

    Args:
      algorithm: The algorithm.
      record: NamedTuple (method, state of the transform): the type of the server's state.
      first: Server-side state of the method -> the initial record.
      receive: (record, state of the method, cohort) -> (new record, rows of the server).
      observe: Record -> arrays that are observed in addition to the method's.
    """

    def method_state(state: State) -> State:
        server = state.server
        return state._replace(server=server.method if isinstance(server, record) else server)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = algorithm.init(key, start and method_state(start))
        return state._replace(server=first(state.server))

    return algorithm._replace(
        init=init,
        send=lambda state, ctx: algorithm.send(method_state(state), ctx),
        receive=lambda state, cohort: receive(state.server, method_state(state), cohort),
        personalize=lambda state, client, ctx: algorithm.personalize(
            method_state(state), client, ctx
        ),
        observe=lambda state: algorithm.observe(method_state(state)) | observe(state.server),
    )


def with_client_state(
    algorithm: Algorithm,
    record: Any,
    first: Callable[[Algorithm, jax.Array, State, State | None], PyTree],
    wrap: Callable[[Algorithm], Algorithm],
) -> Algorithm:
    """Returns an algorithm whose clients also keep state of a transform.

    Args:
      algorithm: The algorithm, with or without groups.
      record: NamedTuple (method, state of the transform): the type of a client's state.
      first: (algorithm, key, state, start) -> initial state of the transform, stacked over
        clients. All are of one group; `start` is the state of an earlier phase or None, and may
        come from an algorithm without the transform.
      wrap: One group's algorithm -> the algorithm with a `record` as client-side state in `train`
        and `personalize`.
    """
    grouped, members = as_grouped(algorithm), group_algorithms(algorithm)

    def method_state(state: State) -> State:
        clients = (c.method if isinstance(c, record) else c for c in state.clients)
        return state._replace(clients=tuple(clients))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = grouped.init(key, start and method_state(start))

        def init_group(g: int) -> Any:
            group_state = state._replace(clients=state.clients[g])
            group_start = start and start._replace(clients=start.clients[g])
            return record(group_state.clients, first(members[g], key, group_state, group_start))

        return state._replace(clients=tuple(map(init_group, range(len(members)))))

    def observe(state: State) -> dict[str, jax.Array]:
        return grouped.observe(method_state(state))

    def of_method(member: Algorithm, wrapped: Algorithm) -> Any:
        """Returns `kept_change` for the new client-side state, unless `wrap` has changed it."""
        share = member.kept_change
        if not callable(share) or wrapped.kept_change is not share:
            return wrapped.kept_change
        return lambda payload, client, ctx: share(payload, client.method, ctx)

    wrapped = tuple(map(wrap, members))
    transformed = grouped._replace(
        init=init,
        train=tuple(member.train for member in wrapped),
        personalize=tuple(member.personalize for member in wrapped),
        traffic=tuple(member.traffic for member in wrapped),
        observe=observe,
        kept_change=tuple(map(of_method, members, wrapped)),
    )
    return transformed if has_groups(algorithm) else as_single_group(transformed)
