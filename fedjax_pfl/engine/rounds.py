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

from fedjax_pfl.core import groups, local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, Cohort, Federation, PyTree, State, Visit
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data
from fedjax_pfl.core.randomness import DROP, INIT, PERSONAL, SAMPLE, SEND, TRAIN, stage_key
from fedjax_pfl.core.task import Task
from fedjax_pfl.engine import multiprocess
from fedjax_pfl.engine.map_clients import map_clients
from fedjax_pfl.engine.records import (
    Evaluation,
    How,
    Log,
    Party,
    Plain,
    Rounds,
    Seats,
    Shared,
)


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
    everywhere = NamedSharding(mesh, P()) if mesh else None
    jit = partial(jax.jit, out_shardings=everywhere)

    def place(tree: PyTree) -> PyTree:
        return multiprocess.put(tree, everywhere) if everywhere else jax.device_put(tree)

    return Rounds(jit(plain.init), jit(plain.run, donate_argnums=1), jit(plain.evaluate), place)


def make_rounds(algorithm: Algorithm, task: Task, federation: Federation, **how: Any) -> Rounds:
    """Compile an algorithm's rounds and its evaluation; `how` as for `plain_rounds`."""
    return compiled(plain_rounds(algorithm, task, federation, **how), how.get("mesh"))


def plain_rounds(
    algorithm: Algorithm,
    task: Task,
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
) -> Plain:
    """An algorithm's rounds and its evaluation.

    Args:
      cohort: clients sampled in a round, without replacement, of those that are active.
      calls: the most rounds in one call of `run`.
      dropout: probability that a sampled client never answers.
      max_update_norm: uploads that change more than this are rejected; None: any finite one counts.
      after: whether `evaluate` also trains every client once more and scores the result.
      validate_after: whether it is that result which is scored on the validation examples.
      evaluated: the ids of those who are evaluated, in order; None: all. Others have no examples.
      chunk, mesh: see `map_clients`.
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
        task,
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
    )

    def init(key: jax.Array, start: State | None = None) -> State:
        return algorithm.init(stage_key(key, INIT), start)

    def run(
        key: jax.Array, state: State, data: FederatedData, t: jax.Array, rounds: jax.Array
    ) -> tuple[State, tuple[Log, ...]]:
        state, logs = _run(how, key, groups.enter(algorithm, state), data, t, rounds)
        return groups.leave(algorithm, state), logs

    def evaluate(key: jax.Array, state: State, data: FederatedData, t: jax.Array) -> Evaluation:
        return _evaluate(how, key, groups.enter(algorithm, state), data, t)

    return Plain(
        init,
        run,
        evaluate,
        partial(_seats, how),
        partial(_meet, how),
        partial(partial, _score_party, how),
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

    return jax.lax.fori_loop(0, rounds, step, Several(state, logs))


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
    return Several(now._replace(clients=clients), logs)


def _meet(
    how: How, key: jax.Array, state: State, parties: tuple[Party, ...], t: Any
) -> tuple[State, tuple[Log, ...]]:
    """One round of the parties: the state with their clients after it, and the logs."""
    met = [
        _meet_group(how, g, Shared(key, state, party.data, t), party)
        for g, party in enumerate(parties)
    ]
    cohorts, clients, logs = zip(*met, strict=True)

    def receive(now: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return how.algorithm.receive(State(*now, ()), cohorts)

    anyone = jnp.any(jnp.concatenate([cohort.arrived for cohort in cohorts]))
    now = (state.server, state.rows)
    server, rows = jax.lax.cond(anyone, receive, groups.unchanged, now)
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
    work = partial(_work, how.members[g], how.max_update_norm)
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


def _work(member: Algorithm, max_update_norm: Any, shared: Shared, seat: Seat) -> Met:
    """One client's round: it downloads, trains, and its answer is looked at and billed."""
    key, state, data, t = shared
    i = seat.i
    payload = member.send(state, Visit(i, None, t, stage_key(key, SEND, t, i)))
    visit = Visit(i, client_data(data, seat.place), t, stage_key(key, TRAIN, t, i))
    upload, variables, client, metrics = member.train(payload, seat.client, visit)
    fine = trees.all_finite((upload, variables, client))
    if max_update_norm is not None:
        moved = trees.squared_norm(trees.change(payload, upload))
        fine &= moved <= jnp.square(jnp.float32(max_update_norm))
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


def _evaluate(
    how: How, key: jax.Array, state: State, data: FederatedData, t: jax.Array
) -> Evaluation:
    """The sum over groups: a client has scores in its own only."""
    n, some = how.federation.clients, how.evaluated
    ids = jnp.arange(n, dtype=jnp.int32) if some is None else jnp.asarray(some, jnp.int32)

    def group(g: int) -> Evaluation:
        own, clients = jnp.asarray(how.membership[g]), state.clients[g]
        if some is not None:
            own, clients = trees.row((own, clients), ids)
        party = Party(Seats(ids, own), ids, data, clients)
        return _score_party(how, g, key, state._replace(clients=()), party, t)

    first, *others = map(group, range(len(how.members)))
    for scores in others:
        first = jax.tree.map(jnp.add, first, scores)
    if some is None:
        return first
    return jax.tree.map(lambda a: jnp.zeros((n, *a.shape[1:]), a.dtype).at[ids].set(a), first)


def _score_party(
    how: How, g: int, key: jax.Array, state: State, party: Party, t: Any
) -> Evaluation:
    """Those of a group, [K]; zeros where a seat is empty."""
    (ids, own), places, data, clients = party
    work = partial(_scores, how, how.members[g])
    items = (ids, places, clients)
    scores = map_clients(work, Shared(key, state, data, t), items, own, how.chunk, how.mesh)
    return trees.where(own, scores, jax.tree.map(jnp.zeros_like, scores))


def _scores(
    how: How, member: Algorithm, shared: Shared, item: tuple[Any, Any, PyTree]
) -> Evaluation:
    """One client's."""
    key, state, data, t = shared
    i, place, client = item
    own = client_data(data, place)
    test = Split(data.test.rows[place], data.test.size[place])
    served = member.personal(state, client, Visit(i, own, t, stage_key(key, PERSONAL, t, i)))
    score = partial(_score, how.task, member, own)
    before, validation = score(served, test), score(served, own.validation)
    if not how.after:
        return Evaluation(before, validation, None)
    payload = member.send(state, Visit(i, None, t, stage_key(key, SEND, t, i)))
    visit = Visit(i, own, t, stage_key(key, TRAIN, t, i))
    _, trained, _, _ = member.train(payload, client, visit)
    if how.validate_after:
        validation = score(trained, own.validation)
    return Evaluation(before, validation, score(trained, test))


def _score(
    task: Task, member: Algorithm, data: ClientData, variables: PyTree, split: Split
) -> local_training.Scores:
    return local_training.evaluate(member.predict, variables, data, split, task)
