"""Clients with different architectures: an algorithm per group, or one that serves all groups."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_pfl.core.algorithm import Algorithm, PyTree, State


def members(algorithm: Algorithm) -> tuple[Algorithm, ...]:
    """One algorithm per group of architectures, each with plain functions in place of tuples."""
    if not isinstance(algorithm.send, tuple):
        return (algorithm,)
    names = ("send", "train", "personal", "predict", "traffic")
    return tuple(
        algorithm._replace(
            **{
                name: part[g] if isinstance(part := getattr(algorithm, name), tuple) else part
                for name in names
            }
        )
        for g in range(len(algorithm.send))
    )


def alone(algorithm: Algorithm) -> Algorithm:
    """An algorithm made of tuples with an entry per group, where there is one group: without them.

    One that shares something between architectures is written for any number of groups.
    """

    def init(key: jax.Array, start: State | None = None) -> State:
        within = start and start._replace(clients=(start.clients,))
        state = algorithm.init(key, within)
        return state._replace(clients=state.clients[0])

    def receive(server: PyTree, rows: PyTree, *cohort_and_t: Any) -> tuple[PyTree, PyTree]:
        *cohort, t = cohort_and_t
        return algorithm.receive(server, rows, *((part,) for part in cohort), t)

    return members(algorithm)[0]._replace(init=init, receive=receive)


def by_group(algorithms: tuple[Algorithm, ...]) -> Algorithm:
    """Run one algorithm in each group of clients, side by side and without exchange.

    Every one of them is built for the whole federation: a client's id is the same everywhere.
    """

    def part(i: int, field: str) -> Callable[..., Any]:
        function = getattr(algorithms[i], field)

        def picked(server: PyTree, rows: PyTree, *rest: Any) -> Any:
            return function(server[i], rows[i], *rest)

        return picked

    def init(key: jax.Array, start: State | None = None) -> State:
        begun = [
            a.init(key, None if start is None else State(*(part[i] for part in start)))
            for i, a in enumerate(algorithms)
        ]
        return State(*map(tuple, zip(*begun, strict=True)))

    def receive(
        server: PyTree,
        rows: PyTree,
        ids: tuple[jax.Array, ...],
        arrived: tuple[jax.Array, ...],
        payloads: PyTree,
        uploads: PyTree,
        t: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        news = []
        for i, a in enumerate(algorithms):

            def step(now: tuple[PyTree, PyTree], i: int = i, a: Algorithm = a) -> Any:
                return a.receive(*now, ids[i], arrived[i], payloads[i], uploads[i], t)

            now = (server[i], rows[i])
            news.append(jax.lax.cond(arrived[i].any(), step, lambda same: same, now))
        new_server, new_rows = zip(*news, strict=True)
        return new_server, new_rows

    def observe(state: State) -> dict[str, jax.Array]:
        return {
            f"{name}_group{i}": values
            for i, a in enumerate(algorithms)
            for name, values in a.observe(State(*(part[i] for part in state))).items()
        }

    every = range(len(algorithms))
    return Algorithm(
        init=init,
        send=tuple(part(i, "send") for i in every),
        train=tuple(a.train for a in algorithms),
        receive=receive,
        personal=tuple(part(i, "personal") for i in every),
        predict=tuple(a.predict for a in algorithms),
        traffic=tuple(a.traffic for a in algorithms),
        observe=observe,
    )
