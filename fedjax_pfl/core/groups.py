"""Clients with different architectures: an algorithm per group, or one that serves all groups."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, PyTree, State

_PER_GROUP = ("send", "train", "personalize", "predict", "traffic")


def has_groups(algorithm: Algorithm) -> bool:
    """Whether it is made of tuples with an entry per group."""
    return isinstance(algorithm.send, tuple)


def group_algorithms(algorithm: Algorithm) -> tuple[Algorithm, ...]:
    """One algorithm per group of architectures, each with plain functions in place of tuples."""
    if not has_groups(algorithm):
        return (algorithm,)

    def member(g: int) -> Algorithm:
        parts = {name: getattr(algorithm, name) for name in _PER_GROUP}
        return algorithm._replace(
            **{name: part[g] if isinstance(part, tuple) else part for name, part in parts.items()}
        )

    return tuple(map(member, range(len(algorithm.send))))


def wrap_clients(algorithm: Algorithm, state: State) -> State:
    """A state of the algorithm with a tuple of clients, one for each group, in any case."""
    return state if has_groups(algorithm) else state._replace(clients=(state.clients,))


def unwrap_clients(algorithm: Algorithm, state: State) -> State:
    """The inverse of `enter`."""
    return state if has_groups(algorithm) else state._replace(clients=state.clients[0])


def as_grouped(algorithm: Algorithm) -> Algorithm:
    """The same algorithm made of tuples, also where there is one group."""
    if has_groups(algorithm):
        return algorithm

    def init(key: jax.Array, start: State | None = None) -> State:
        return wrap_clients(
            algorithm, algorithm.init(key, start and unwrap_clients(algorithm, start))
        )

    def receive(state: State, cohorts: tuple[Cohort, ...]) -> tuple[PyTree, PyTree]:
        return algorithm.receive(state, cohorts[0])

    def observe(state: State) -> dict[str, jax.Array]:
        return algorithm.observe(unwrap_clients(algorithm, state))

    per_group = {name: (getattr(algorithm, name),) for name in _PER_GROUP}
    return algorithm._replace(init=init, receive=receive, observe=observe, **per_group)


def as_single_group(algorithm: Algorithm) -> Algorithm:
    """An algorithm made of tuples with an entry per group, where there is one group: without them.

    One that shares something between architectures is written for any number of groups.
    """
    single = group_algorithms(algorithm)[0]

    def init(key: jax.Array, start: State | None = None) -> State:
        return unwrap_clients(single, algorithm.init(key, start and wrap_clients(single, start)))

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return algorithm.receive(state, (cohort,))

    def observe(state: State) -> dict[str, jax.Array]:
        return algorithm.observe(wrap_clients(single, state))

    return single._replace(init=init, receive=receive, observe=observe)


def by_group(algorithms: tuple[Algorithm, ...]) -> Algorithm:
    """Run one algorithm in each group of clients, side by side and without exchange.

    Every one of them is built for the whole federation: a client's id is the same everywhere.
    """

    def part(state: State, g: int) -> State:
        return State(*(whole[g] if whole else () for whole in state))

    def sender(g: int) -> Callable[..., PyTree]:
        def send(state: State, ctx: ClientContext) -> PyTree:
            return algorithms[g].send(part(state, g), ctx)

        return send

    def server_of(g: int) -> Callable[..., PyTree]:
        def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
            return algorithms[g].personalize(part(state, g), client, ctx)

        return personalize

    def init(key: jax.Array, start: State | None = None) -> State:
        begun = [a.init(key, start and part(start, g)) for g, a in enumerate(algorithms)]
        return State(*map(tuple, zip(*begun, strict=True)))

    def receive(state: State, cohorts: tuple[Cohort, ...]) -> tuple[PyTree, PyTree]:
        def received(g: int) -> tuple[PyTree, PyTree]:
            def step(now: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                return algorithms[g].receive(State(*now, ()), cohorts[g])

            now = (state.server[g], state.rows[g])
            return jax.lax.cond(cohorts[g].arrived.any(), step, unchanged, now)

        servers, rows = zip(*map(received, range(len(algorithms))), strict=True)
        return servers, rows

    def observe(state: State) -> dict[str, jax.Array]:
        return {
            f"{name}_group{g}": values
            for g, a in enumerate(algorithms)
            for name, values in a.observe(part(state, g)).items()
        }

    every = range(len(algorithms))
    return Algorithm(
        init=init,
        send=tuple(map(sender, every)),
        train=tuple(a.train for a in algorithms),
        receive=receive,
        personalize=tuple(map(server_of, every)),
        predict=tuple(a.predict for a in algorithms),
        traffic=tuple(a.traffic for a in algorithms),
        observe=observe,
    )


def unchanged(now: Any) -> Any:
    """What `receive` comes to where nobody arrived."""
    return now
