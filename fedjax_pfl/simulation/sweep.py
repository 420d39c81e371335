"""Sweeps: several runs in one program that differ only in seed and real-valued settings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation.records import CompiledRounds, RoundFunctions
from fedjax_pfl.simulation.rounds import compile_rounds


class SeparateRunsError(UsageError):
    """Error: one program cannot compute runs that differ in some settings.

    Args:
      names: The settings.
      message: Text for the user.
    """

    def __init__(self, names: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.names = tuple(names)


class Points(NamedTuple):
    """Seed and settings of the P runs of a sweep. Takes the place of a run's key."""

    key: jax.Array  # [P]: random key of each run
    number: jax.Array  # int32 [P]: index of each run into the values of every swept setting


def points(seeds: Sequence[int]) -> Points:
    """Returns the points of a sweep with one run for each seed, numbered from 0."""
    return Points(jnp.stack([jax.random.key(seed) for seed in seeds]), jnp.arange(len(seeds)))


def shapes_of_one(shapes: Any) -> Any:
    """Returns a tree of shapes without axis 0, the axis of the runs."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), shapes)


def make_rounds(
    make: Callable[[Mapping[str, Any]], RoundFunctions],
    settings: Mapping[str, Sequence[float]],
    mesh: Mesh | None,
    width: int,
    *,
    own_data: bool = False,
) -> CompiledRounds:
    """Returns compiled rounds of all runs, with `Points` as key and runs on axis 0 of results.

    Args:
      make: Function from the swept settings, each a traced float32 scalar, to one run's rounds.
      settings: For each swept setting, by name, its values, which `Points.number` selects from.
      mesh: Devices; None: one device.
      width: Number of runs that are computed at the same time.
      own_data: Whether the data have the runs on axis 0; otherwise all runs have the same data.
    """

    def functions(index: jax.Array) -> RoundFunctions:
        """Returns the rounds of the run whose `Points.number` is `index`."""
        tables = {name: jnp.asarray(values, jnp.float32) for name, values in settings.items()}
        return make({name: table[index] for name, table in tables.items()})

    def map_runs(f: Callable[..., Any], *trees: Any) -> Any:
        """Maps `f` over axis 0 of the trees, its arguments."""
        batch_size = width if width > 1 else None
        return jax.lax.map(lambda arguments: f(*arguments), trees, batch_size=batch_size)

    def init(points: Points, start: Any = None) -> Any:
        if start is None:
            return map_runs(lambda p: functions(p.number).init(p.key), points)
        return map_runs(lambda p, start: functions(p.number).init(p.key, start), points, start)

    def run(points: Points, state: Any, data: Any, t: jax.Array, n: jax.Array) -> Any:
        def run_one(p: Points, s: Any, data: Any = data) -> Any:
            return functions(p.number).run(p.key, s, data, t, n)

        return map_runs(run_one, points, state, *([data] if own_data else []))

    def evaluate(points: Points, state: Any, data: Any, t: jax.Array) -> Any:
        def evaluate_one(p: Points, s: Any, data: Any = data) -> Any:
            return functions(p.number).evaluate(p.key, s, data, t)

        return map_runs(evaluate_one, points, state, *([data] if own_data else []))

    return compile_rounds(RoundFunctions(init, run, evaluate), mesh)
