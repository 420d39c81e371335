"""A compiled round, and many of them in one call: sample, send, train, receive, count.

Sampling, chunking, sharding, masking and counting live here and nowhere else. A round is computed
from its cohort's own rows and examples (`Party`), wherever those of all clients lie.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.core import far, groups, trees
from fedjax_pfl.core.algorithm import Algorithm, Cohort, Federation, PyTree, State, Visit
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.randomness import DROP, INIT, SAMPLE, SEND, TRAIN, stage_key
from fedjax_pfl.simulation import multiprocess, spread
from fedjax_pfl.simulation.map_clients import map_clients
from fedjax_pfl.simulation.records import (
    Evaluation,
    How,
    Log,
    Party,
    Plain,
    Rounds,
    Seats,
    Shared,
)
from fedjax_pfl.simulation.scoring import evaluation, score_party


class Seat(NamedTuple):
    """A place in the cohort; stacked on axis 0."""

    i: jax.Array
    place: jax.Array
    present: jax.Array
    dropped: jax.Array
    client: PyTree


class Met(NamedTuple):
    """What a client's round comes to; stacked on axis 0."""

    payload: PyTree
    upload: PyTree
    client: PyTree
    metrics: dict[str, jax.Array]
    fine: jax.Array  # bool: finite, and not too large
    down: dict[str, jax.Array]
    up: dict[str, jax.Array]


class Several(NamedTuple):
    """The carry of `run`."""

    state: State
    logs: tuple[Log, ...]


def compiled(plain: Plain, mesh: Mesh | None = None) -> Rounds:
    """Rounds on one device, or on all of a mesh."""
    if plain.how is not None and plain.how.spread:
        return spread.compiled(plain)
    everywhere = NamedSharding(mesh, P()) if mesh else None
    jit = partial(jax.jit, out_shardings=everywhere)

    def place(tree: PyTree) -> PyTree:
        return multiprocess.put(tree, everywhere) if everywhere else jax.device_put(tree)

    run = jit(plain.run, donate_argnums=1)
    return Rounds(jit(plain.init), run, jit(plain.evaluate), place, place, everywhere)


def make_rounds(algorithm: Algorithm, federation: Federation, **how: Any) -> Rounds:
    """Compile an algorithm's rounds and its evaluation; `how` as for `plain_rounds`."""
    return compiled(plain_rounds(algorithm, federation, **how), how.get("mesh"))


def plain_rounds(
    algorithm: Algorithm,
    federation: Federation,
    *,
    cohort: int,
    calls: int = 1,
    dropout: float = 0.0,
    max_update_norm: float | None = None,
    after: bool = True,
    validate_after: bool = False,
    evaluated: np.ndarray | None = None,
    chunk: int = 1,
    mesh: Mesh | None = None,
    by_client: bool = False,
) -> Plain:
    """An algorithm's rounds and its evaluation.

    Args:
      cohort: clients sampled in a round, without replacement, of those that are active.
      calls: the most rounds in one call of `run`.
      dropout: probability that a sampled client never answers.
      max_update_norm: Updates with a larger norm are rejected. None: those whose squared norm is
        not finite in float32, 1.8e19 and more.
      after: whether `evaluate` also trains every client once more and scores the result.
      validate_after: whether it is that result which is scored on the validation examples.
      evaluated: the ids of those who are evaluated, in order; None: all. Others have no examples.
      chunk, mesh: see `map_clients`.
      by_client: whether the state's rows and clients are spread over the mesh; see `spread`.
    """
    active = int(np.sum(federation.active))
    if not 1 <= cohort <= active:
        raise UsageError(
            f"clients_per_round is {cohort}, and there are {active} active clients; "
            f"choose 1 to {active}"
        )
    members = groups.members(algorithm)
    several = groups.has_groups(algorithm)
    of_group = federation.groups if several else np.zeros(federation.clients, int)
    how = How(
        algorithm,
        groups.grouped(algorithm),
        members,
        tuple(of_group == g for g in range(len(members))),
        federation,
        cohort,
        calls,
        dropout,
        max_update_norm,
        after,
        validate_after,
        evaluated,
        chunk,
        mesh,
        by_client and mesh is not None,
    )

    def init(key: jax.Array, start: State | None = None) -> State:
        return algorithm.init(stage_key(key, INIT), start)

    def run(
        key: jax.Array, state: State, data: FederatedData, t: jax.Array, rounds: jax.Array
    ) -> tuple[State, tuple[Log, ...]]:
        state, logs = _run(how, key, groups.enter(algorithm, state), data, t, rounds)
        return groups.leave(algorithm, state), logs

    def evaluate(key: jax.Array, state: State, data: FederatedData, t: jax.Array) -> Evaluation:
        return evaluation(how, key, groups.enter(algorithm, state), data, t)

    return Plain(
        init,
        run,
        evaluate,
        partial(_seats, how),
        partial(_meet, how),
        partial(partial, score_party, how),
        how,
    )


def _run(
    how: How, key: jax.Array, state: State, data: FederatedData, t: jax.Array, rounds: jax.Array
) -> Several:
    # Traced once, for the shapes of the log and for the loop.
    one_round = jax.jit(partial(_round, how), inline=True)
    shapes = jax.eval_shape(one_round, key, state, data, t).logs
    logs = jax.tree.map(lambda s: jnp.zeros((how.calls, *s.shape), s.dtype), shapes)

    def step(r: jax.Array, so_far: Several) -> Several:
        now = one_round(key, so_far.state, data, t + r)
        written = jax.tree.map(lambda whole, new: whole.at[r].set(new), so_far.logs, now.logs)
        return Several(now.state, written)

    return jax.lax.fori_loop(0, rounds, step, Several(spread.pinned(how, state), logs))


def _round(how: How, key: jax.Array, state: State, data: FederatedData, t: Any) -> Several:
    """One round, with all clients at hand; `state.clients` is a tuple."""
    each = _seats(how, key, t)
    parties = tuple(
        Party(seats, seats.ids, data, trees.row(clients, seats.ids))
        for seats, clients in zip(each, state.clients, strict=True)
    )
    now, logs = _meet(how, key, state._replace(clients=()), parties, t)
    n = how.federation.clients
    clients = tuple(
        trees.put(whole, jnp.where(log.arrived, log.ids, n), new)
        for whole, log, new in zip(state.clients, logs, now.clients, strict=True)
    )
    return Several(spread.pinned(how, now._replace(clients=clients)), logs)


def _meet(
    how: How, key: jax.Array, state: State, parties: tuple[Party, ...], t: Any
) -> tuple[State, tuple[Log, ...]]:
    """One round of the parties: the state with their clients after it, and the logs."""
    met = [
        _meet_group(how, g, Shared(key, state, party.data, t), party)
        for g, party in enumerate(parties)
    ]
    cohorts, clients, logs = zip(*met, strict=True)

    def receive(cohorts: Any, now: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        server, rows = how.algorithm.receive(State(*now, ()), cohorts)
        return spread.pinned(how, State(server, rows, ()))[:2]

    anyone = jnp.any(jnp.concatenate([cohort.arrived for cohort in cohorts]))
    now = (state.server, state.rows)

    def received(now: Any, cohorts: Any, anyone: jax.Array) -> tuple[PyTree, PyTree]:
        return jax.lax.cond(anyone, partial(receive, cohorts), groups.unchanged, now)

    if how.mesh is not None and far.leaves_of(state.rows):
        # Each device asks for rows by itself: XLA would let one ask for all.
        received = jax.shard_map(
            received, mesh=how.mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
    server, rows = received(now, cohorts, anyone)
    return State(server, rows, clients), logs


def _sample(how: How, key: jax.Array, t: Any) -> jax.Array:
    """The ids of a round's cohort, in their order."""
    candidates = np.flatnonzero(how.federation.active).astype(np.int32)
    if how.cohort == len(candidates):
        return jnp.asarray(candidates)
    draws = jax.random.uniform(stage_key(key, SAMPLE, t), (len(candidates),))
    _, lowest = jax.lax.top_k(-draws, how.cohort)  # of two alike the first, as a sort would have it
    return jnp.sort(jnp.asarray(candidates)[lowest])


def _seats(how: How, key: jax.Array, t: Any) -> tuple[Seats, ...]:
    """Those of each group."""
    ids = _sample(how, key, t)
    return tuple(_seats_of_group(how, g, ids) for g in range(len(how.members)))


def _seats_of_group(how: How, g: int, ids: jax.Array) -> Seats:
    """The cohort's clients of group g in a fixed number of places."""
    candidates = how.membership[g][how.federation.active]
    if candidates.all():
        return Seats(ids, jnp.ones(how.cohort, bool))
    own = jnp.asarray(how.membership[g])[ids]
    # At least one, empty, where every client of a group is novel: arrays need a length.
    places = max(1, min(how.cohort, int(np.sum(candidates))))
    order = jnp.argsort(~own, stable=True)[:places]
    return Seats(ids[order], own[order])


def _meet_group(how: How, g: int, shared: Shared, party: Party) -> tuple[Cohort, PyTree, Log]:
    """One group's part of a round: what the server gets, the group's clients after it, the log."""
    ids, present = party.seats

    def draw(i: jax.Array) -> jax.Array:
        return jax.random.uniform(stage_key(shared.key, DROP, shared.t, i))

    dropped = present & (jax.vmap(draw)(ids) < how.dropout)
    seats = Seat(ids, party.places, present, dropped, party.clients)
    send, train = partial(_send, how.members[g]), partial(_train, how, how.members[g])
    if how.spread and jax.tree.leaves(shared.state.rows):
        # What reads the rows of all clients is computed where they are.
        known, before = shared._replace(state=None), partial(send, shared)
        met = map_clients(train, known, seats, present, how.chunk, how.mesh, before)
    else:

        def work(shared: Shared, seat: Seat) -> Met:
            return train(shared, (seat, send(shared, seat)))

        met = map_clients(work, shared, seats, present, how.chunk, how.mesh)

    arrived = present & ~dropped & met.fine
    safe = jnp.where(arrived, ids, how.federation.clients)
    counts = jnp.asarray(how.federation.counts, jnp.float32)
    weights = counts.at[safe].get(mode="fill", fill_value=0.0)
    # Zero is as good as anything there, but for 0 · NaN.
    uploads, metrics = (
        trees.where(arrived, part, jax.tree.map(jnp.zeros_like, part))
        for part in (met.upload, met.metrics)
    )
    cohort = Cohort(safe, arrived, weights, met.payload, uploads, shared.t)
    rejected = present & ~dropped & ~met.fine
    return cohort, met.client, Log(ids, present, dropped, rejected, metrics, met.down, met.up)


def _send(member: Algorithm, shared: Shared, seat: Seat) -> PyTree:
    """What a client downloads."""
    key, state, _, t = shared
    return member.send(state, Visit(seat.i, None, t, stage_key(key, SEND, t, seat.i)))


def _train(how: How, member: Algorithm, shared: Shared, sent: tuple[Seat, PyTree]) -> Met:
    """The rest of a client's round: it trains, and its answer is looked at and billed."""
    (key, _, data, t), (seat, payload) = shared, sent
    i = seat.i
    visit = Visit(i, client_data(data, seat.place), t, stage_key(key, TRAIN, t, i))
    upload, variables, client, metrics = member.train(payload, seat.client, visit)
    fine = trees.all_finite((upload, variables, client))
    # Squares of a change this large overflow, and the server's state would soon not be finite.
    moved = trees.squared_norm(trees.change(payload, upload))
    fine &= jnp.isfinite(moved)
    if how.max_update_norm is not None:
        fine &= moved <= jnp.square(jnp.float32(how.max_update_norm))
    bill = member.traffic(payload, upload)
    down = _counted(bill.down, seat.present)
    up = _counted(bill.up, seat.present & ~seat.dropped)
    return Met(payload, upload, client, metrics, fine, down, up)


def _counted(bill: dict[str, Any], counts: jax.Array) -> dict[str, jax.Array]:
    """A client's bill as int32, zero where it does not count."""
    for layer, amount in bill.items():
        if isinstance(amount, int) and amount >= 2**31:
            raise UsageError(f"layer {layer} has {amount:,} bytes; at most 2**31 - 1 can be billed")
    return {layer: jnp.where(counts, jnp.int32(amount), 0) for layer, amount in bill.items()}
