"""Several runs as one program: points that differ in their seed and real-valued settings only."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine.rounds import Plain, Rounds, compiled


class Apart(UsageError):
    """Settings, by name, whose several values one program cannot have."""

    def __init__(self, names: Sequence[str], line: str) -> None:
        super().__init__(line)
        self.names = tuple(names)


class Points(NamedTuple):
    """What each point of a sweep has of its own, on axis 0; in the place of a run's key."""

    key: jax.Array
    at: jax.Array  # int32 [points]: where its values are among those of each setting


class Swept:
    """A setting with a value in each point: `now` is that of the point which is computed.

    Checks and choices are made once for all points: they see every value and must come out the
    same. What numbers make of it is computed on the host, as for a run of its own, to the last bit.
    What needs a number before the program is compiled raises TypeError.
    """

    def __init__(self, name: str, values: Sequence[float], index: jax.Array) -> None:
        self.name, self.values, self.index = name, tuple(values), index

    @property
    def now(self) -> jax.Array:
        return jnp.asarray(self.values, jnp.float32)[self.index]

    def __jax_array__(self) -> jax.Array:
        return self.now

    def __repr__(self) -> str:
        return " or ".join(dict.fromkeys(f"{value:g}" for value in self.values))

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._agreed([value != 0 for value in self.values])

    def __neg__(self) -> Any:
        return 0 - self  # type: ignore[operator]

    def __round__(self, digits: int | None = None) -> int:
        raise TypeError(f"{self.name} shapes the program")

    __int__ = __float__ = __index__ = __round__

    def _agreed(self, answers: Sequence[bool]) -> bool:
        if len(set(answers)) > 1:
            line = f"{self.name} is {self}, which makes different programs; run them one by one"
            raise Apart([self.name], line)
        return answers[0]

    def _each(self, other: Any, f: Callable[[Any, Any], Any]) -> list[Any]:
        others = other.values if isinstance(other, Swept) else [other] * len(self.values)
        return [f(a, b) for a, b in zip(self.values, others, strict=True)]


def _arithmetic(f: Callable[[Any, Any], Any]) -> Callable[[Swept, Any], Any]:
    def apply(self: Swept, other: Any) -> Any:
        if isinstance(other, (jax.Array, np.ndarray)):
            return f(self.now, other)
        return Swept(self.name, self._each(other, f), self.index)

    return apply


def _comparison(f: Callable[[Any, Any], Any]) -> Callable[[Swept, Any], Any]:
    def apply(self: Swept, other: Any) -> Any:
        if isinstance(other, (jax.Array, np.ndarray)):
            return f(self.now, other)
        return self._agreed(self._each(other, f))

    return apply


def _swapped(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: f(b, a)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _f = getattr(operator, _name)
    setattr(Swept, f"__{_name}__", _arithmetic(_f))
    setattr(Swept, f"__r{_name}__", _arithmetic(_swapped(_f)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Swept, f"__{_name}__", _comparison(getattr(operator, _name)))


def points(seeds: Sequence[int]) -> Points:
    """The points of a sweep."""
    return Points(jnp.stack([jax.random.key(seed) for seed in seeds]), jnp.arange(len(seeds)))


def alone(shapes: Any) -> Any:
    """Of the shapes of all points' states those of one."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), shapes)


def make_rounds(
    make: Callable[[Mapping[str, Any]], Plain],
    settings: Mapping[str, Sequence[float]],
    mesh: Mesh | None,
    width: int,
) -> Rounds:
    """Rounds of all points: as of one, with Points for the key and the points on axis 0 of results.

    Args:
      make: from the settings that differ to the rounds of one point.
      settings: their values, by name.
      width: how many points are computed at once; the others follow.
    """

    def plain(index: jax.Array) -> Plain:
        return make({name: Swept(name, each, index) for name, each in settings.items()})

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

    return compiled(Plain(init, run, evaluate), mesh)
