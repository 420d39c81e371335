"""What transforms have in common: an algorithm in, an algorithm out, and something more to keep."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_pfl.core.algorithm import Algorithm, PyTree, State
from fedjax_pfl.core.groups import alone, grouped, has_groups, members

Transform = Callable[[Algorithm], Algorithm]


def chain(algorithm: Algorithm, *transforms: Transform) -> Algorithm:
    """The algorithm with the transforms around it, the first one innermost."""
    for transform in transforms:
        algorithm = transform(algorithm)
    return algorithm


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
      wrap: one group's algorithm, whose clients are `record`s in `train` and `personal`.
    """
    whole, parts = grouped(algorithm), members(algorithm)

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
        personal=tuple(one.personal for one in wrapped),
        traffic=tuple(one.traffic for one in wrapped),
        observe=observe,
    )
    return made if has_groups(algorithm) else alone(made)
