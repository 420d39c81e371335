"""Several runs as one program: points that differ in their seed and real-valued settings only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation.records import CompiledRounds, RoundFunctions
from fedjax_pfl.simulation.rounds import compiled


class Apart(UsageError):
    """Settings, by name, whose several values one program cannot have."""

    def __init__(self, names: Sequence[str], line: str) -> None:
        super().__init__(line)
        self.names = tuple(names)


class Points(NamedTuple):
    """What each point of a sweep has of its own, on axis 0; in the place of a run's key."""

    key: jax.Array
    at: jax.Array  # int32 [points]: where its values are among those of each setting


def points(seeds: Sequence[int]) -> Points:
    """The points of a sweep."""
    return Points(jnp.stack([jax.random.key(seed) for seed in seeds]), jnp.arange(len(seeds)))


def alone(shapes: Any) -> Any:
    """Of the shapes of all points' states those of one."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), shapes)


def make_rounds(
    make: Callable[[Mapping[str, Any]], RoundFunctions],
    settings: Mapping[str, Sequence[float]],
    mesh: Mesh | None,
    width: int,
) -> CompiledRounds:
    """Rounds of all points: as of one, with Points for the key and the points on axis 0 of results.

    Args:
      make: from the settings that differ, each a traced float32 [], to the rounds of one point.
      settings: their values, by name, which have been checked.
      width: how many points are computed at once; the others follow.
    """

    def plain(index: jax.Array) -> RoundFunctions:
        values = {name: jnp.asarray(each, jnp.float32) for name, each in settings.items()}
        return make({name: each[index] for name, each in values.items()})

    def over(f: Callable[..., Any], *trees: Any) -> Any:
        at_once = width if width > 1 else None
        return jax.lax.map(lambda point: f(*point), trees, batch_size=at_once)

    def init(points: Points, start: Any = None) -> Any:
        if start is None:
            return over(lambda p: plain(p.at).init(p.key), points)
        return over(lambda p, start: plain(p.at).init(p.key, start), points, start)

    def run(points: Points, state: Any, data: Any, t: jax.Array, n: jax.Array) -> Any:
        return over(lambda p, s: plain(p.at).run(p.key, s, data, t, n), points, state)

    def evaluate(points: Points, state: Any, data: Any, t: jax.Array) -> Any:
        return over(lambda p, s: plain(p.at).evaluate(p.key, s, data, t), points, state)

    return compiled(RoundFunctions(init, run, evaluate), mesh)
