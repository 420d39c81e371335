"""What transforms have in common: an algorithm in, an algorithm out, and something more to keep."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.core.groups import (
    as_grouped,
    as_single_group,
    group_algorithms,
    has_groups,
    unwrap_clients,
    wrap_clients,
)
from fedjax_pfl.core.setting import Setting

Transform = Callable[[Algorithm], Algorithm]


class Around(NamedTuple):
    """What there is around a phase's algorithm, for transforms that settings ask for."""

    model: Any  # of the first group of architectures
    federation: Federation
    data: FederatedData  # of which only the shapes matter
    words: Mapping[str, Mapping[str, Any]]  # what names mean, by the setting that has such a name


class Selectable(NamedTuple):
    """A transform that settings can ask for."""

    title: str  # of the settings among which its own are listed
    settings: Mapping[str, Setting]
    make: Callable[[Callable[[str], Any], Around], Transform | None]  # None: they do not ask


def chain(algorithm: Algorithm, *transforms: Transform) -> Algorithm:
    """The algorithm with the transforms around it, the first one innermost.

    What transforms of an earlier phase have kept beside the method's state is not for the method:
    each transform takes its own off, and here the rest goes. Their records begin with `method`.
    """
    inner = algorithm

    def init(key: jax.Array, start: State | None = None) -> State:
        if start is None:
            return inner.init(key)
        clients = tuple(map(_bare, wrap_clients(inner, start).clients))
        bare = State(_bare(start.server), start.rows, clients)
        return inner.init(key, unwrap_clients(inner, bare))

    algorithm = inner._replace(init=init)
    for transform in transforms:
        algorithm = transform(algorithm)
    return algorithm


def _bare(part: PyTree) -> PyTree:
    """A part of a method's state, without the records of transforms around it."""
    while getattr(part, "_fields", ("",))[0] == "method":
        part = part.method
    return part


def keeping(
    algorithm: Algorithm,
    record: Any,
    first: Callable[[Algorithm, jax.Array, State, State | None], PyTree],
    wrap: Callable[[Algorithm], Algorithm],
) -> Algorithm:
    """An algorithm whose clients keep something of the transform's own as well.

    Args:
      record: a NamedTuple of (method, what the transform keeps), the type of a client's state.
      first: (member, key, state, start) -> what it keeps at first, stacked. Both states are those
        of one group of clients; the start may be of an algorithm without the transform.
      wrap: one group's algorithm, whose clients are `record`s in `train` and `personalize`.
    """
    whole, parts = as_grouped(algorithm), group_algorithms(algorithm)

    def bare(state: State) -> State:
        methods = (c.method if isinstance(c, record) else c for c in state.clients)
        return state._replace(clients=tuple(methods))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = whole.init(key, start and bare(start))

        def begun(g: int) -> Any:
            own = state._replace(clients=state.clients[g])
            before = start and start._replace(clients=start.clients[g])
            return record(own.clients, first(parts[g], key, own, before))

        return state._replace(clients=tuple(map(begun, range(len(parts)))))

    def observe(state: State) -> dict[str, jax.Array]:
        return whole.observe(bare(state))

    wrapped = tuple(map(wrap, parts))
    made = whole._replace(
        init=init,
        train=tuple(one.train for one in wrapped),
        personalize=tuple(one.personalize for one in wrapped),
        traffic=tuple(one.traffic for one in wrapped),
        observe=observe,
    )
    return made if has_groups(algorithm) else as_single_group(made)
