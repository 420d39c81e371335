"""Federations whose clients have different architectures, in groups of one architecture each.

A grouped algorithm has tuples of functions, one per group; see `Algorithm`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, Federation, PyTree, State

_PER_GROUP = ("send", "train", "personalize", "predict", "traffic", "kept_change")


def has_groups(algorithm: Algorithm) -> bool:
    """Returns True if the algorithm has tuples with a function per group."""
    return isinstance(algorithm.send, tuple)


def group_algorithms(algorithm: Algorithm) -> tuple[Algorithm, ...]:
    """Returns one algorithm per group, with functions instead of tuples.

    Only functions of one client differ; `init`, `receive` and `observe` stay those of all groups.
    """
    if not has_groups(algorithm):
        return (algorithm,)
    parts = {name: getattr(algorithm, name) for name in _PER_GROUP}

    def group_algorithm(g: int) -> Algorithm:
        return algorithm._replace(
            **{name: part[g] if isinstance(part, tuple) else part for name, part in parts.items()}
        )

    return tuple(map(group_algorithm, range(len(algorithm.send))))


def wrap_clients(algorithm: Algorithm, state: State) -> State:
    """Returns the state with a tuple of client-side states, one per group.

    Without groups, the tuple has one entry; the state of a grouped algorithm is unchanged.
    """
    return state if has_groups(algorithm) else state._replace(clients=(state.clients,))


def unwrap_clients(algorithm: Algorithm, state: State) -> State:
    """Returns the state as the algorithm expects it; the inverse of `wrap_clients`."""
    return state if has_groups(algorithm) else state._replace(clients=state.clients[0])


def as_grouped(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm with tuples of functions, cohorts and client states, one per group.

    An algorithm without groups gets tuples of length 1; a grouped one is unchanged.
    """
    if has_groups(algorithm):
        return algorithm

    def init(key: jax.Array, start: State | None = None) -> State:
        state = algorithm.init(key, start and unwrap_clients(algorithm, start))
        return wrap_clients(algorithm, state)

    def receive(state: State, cohorts: tuple[Cohort, ...]) -> tuple[PyTree, PyTree]:
        return algorithm.receive(state, cohorts[0])

    def observe(state: State) -> dict[str, jax.Array]:
        return algorithm.observe(unwrap_clients(algorithm, state))

    per_group = {name: (getattr(algorithm, name),) for name in _PER_GROUP}
    return algorithm._replace(init=init, receive=receive, observe=observe, **per_group)


def as_single_group(algorithm: Algorithm) -> Algorithm:
    """Returns a grouped algorithm with one group as an algorithm without groups.

    Methods that share parts between architectures are written for any number of groups.
    """
    single = group_algorithms(algorithm)[0]

    def init(key: jax.Array, start: State | None = None) -> State:
        return unwrap_clients(single, algorithm.init(key, start and wrap_clients(single, start)))

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return algorithm.receive(state, (cohort,))

    def observe(state: State) -> dict[str, jax.Array]:
        return algorithm.observe(wrap_clients(single, state))

    return single._replace(init=init, receive=receive, observe=observe)


def group_federation(federation: Federation, g: int) -> Federation:
    """Returns the federation of a method that serves group `g` only.

    Clients of other groups keep their ids and are not active, in earlier phases neither: no model
    of them is stored.
    """
    in_group, earlier = federation.groups == g, federation.earlier
    return federation._replace(
        active=federation.active & in_group,
        earlier=None if earlier is None else earlier & in_group,
    )


def by_group(algorithms: tuple[Algorithm, ...]) -> Algorithm:
    """Returns a grouped algorithm that runs one algorithm per group, without exchange.

    Build the algorithm of group g for `group_federation(federation, g)`.
    """

    def group_state(state: State, g: int) -> State:
        return State(*(part[g] if part else () for part in state))

    def send_of(g: int) -> Callable[..., PyTree]:
        def send(state: State, ctx: ClientContext) -> PyTree:
            return algorithms[g].send(group_state(state, g), ctx)

        return send

    def personalize_of(g: int) -> Callable[..., PyTree]:
        def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
            return algorithms[g].personalize(group_state(state, g), client, ctx)

        return personalize

    def start_of(start: State, g: int) -> State:
        """Returns the part of group `g`, or the whole server if all groups shared one."""
        is_grouped = type(start.server) is tuple and type(start.rows) is tuple
        return group_state(start, g) if is_grouped else start._replace(clients=())

    def init(key: jax.Array, start: State | None = None) -> State:
        states = [a.init(key, start and start_of(start, g)) for g, a in enumerate(algorithms)]
        return State(*map(tuple, zip(*states, strict=True)))

    def receive(state: State, cohorts: tuple[Cohort, ...]) -> tuple[PyTree, PyTree]:
        def receive_group(g: int) -> tuple[PyTree, PyTree]:
            def update(server_and_rows: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                return algorithms[g].receive(State(*server_and_rows, ()), cohorts[g])

            server_and_rows = (state.server[g], state.rows[g])
            return jax.lax.cond(cohorts[g].arrived.any(), update, unchanged, server_and_rows)

        servers, rows = zip(*map(receive_group, range(len(algorithms))), strict=True)
        return servers, rows

    def observe(state: State) -> dict[str, jax.Array]:
        return {
            f"{name}_group{g}": values
            for g, a in enumerate(algorithms)
            for name, values in a.observe(group_state(state, g)).items()
        }

    groups = range(len(algorithms))
    return Algorithm(
        init=init,
        send=tuple(map(send_of, groups)),
        train=tuple(a.train for a in algorithms),
        receive=receive,
        personalize=tuple(map(personalize_of, groups)),
        predict=tuple(a.predict for a in algorithms),
        traffic=tuple(a.traffic for a in algorithms),
        observe=observe,
        kept_change=tuple(a.kept_change for a in algorithms),
    )


def share_server(models: Any, build: Callable[[Any], Algorithm]) -> Algorithm:
    """Returns an algorithm whose groups of clients have their own networks and one server state.

    The server state, payloads and uploads may not depend on the network. There are no server-side
    rows. The server sees one cohort, with the clients of the first group first.

    Args:
      models: A network, or a tuple with one for each group.
      build: Creates the algorithm for one network. Its client-side state has a row for each of
        the N clients.
    """
    if not isinstance(models, tuple):
        return build(models)
    algorithms = tuple(map(build, models))

    def init(key: jax.Array, start: State | None = None) -> State:
        states = [
            a.init(key, start and start._replace(clients=start.clients[g]))
            for g, a in enumerate(algorithms)
        ]
        return states[0]._replace(clients=tuple(state.clients for state in states))

    def receive(state: State, cohorts: tuple[Cohort, ...]) -> tuple[PyTree, PyTree]:
        def join(*parts: jax.Array) -> jax.Array:
            return jnp.concatenate(parts)

        joined = jax.tree.map(join, *(cohort._replace(t=(), key=()) for cohort in cohorts))
        first = cohorts[0]
        return algorithms[0].receive(state, joined._replace(t=first.t, key=first.key))

    def observe(state: State) -> dict[str, jax.Array]:
        return algorithms[0].observe(state._replace(clients=()))

    per_group = {name: tuple(getattr(a, name) for a in algorithms) for name in _PER_GROUP}
    return algorithms[0]._replace(init=init, receive=receive, observe=observe, **per_group)


def unchanged(server_and_rows: Any) -> Any:
    """Returns its argument: the result of `receive` if no client returned an update."""
    return server_and_rows
