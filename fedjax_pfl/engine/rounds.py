"""A compiled round, and many of them in one call: sample, send, train, receive, count.

Sampling, chunking, sharding, masking and counting live here and nowhere else.
"""

from collections.abc import Callable
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


class Log(NamedTuple):
    """What happened to a group's cohort; from `Rounds.run` with a leading axis of rounds."""

    ids: jax.Array  # int32 [K]
    present: jax.Array  # bool [K]: sampled into this slot
    dropped: jax.Array  # bool [K]: downloaded and never answered
    rejected: jax.Array  # bool [K]: the answer was not finite, or too large
    metrics: dict[str, jax.Array]  # [K] each, of those that arrived
    down: dict[str, jax.Array]  # int32 [K] bytes by layer
    up: dict[str, jax.Array]


class Evaluation(NamedTuple):
    """Sums over each client's examples, [N]: as served, and after one more local training."""

    before: local_training.Scores
    validation: local_training.Scores  # as served or, where that is to choose, after local training
    after: local_training.Scores | None


class Plain(NamedTuple):
    """An algorithm's rounds, to be compiled.

    init      (key, start=None) -> State
    run       (key, state, data, t, n) -> (state, logs): rounds t .. t+n-1, n up to `calls`
    evaluate  (key, state, data, t) -> Evaluation
    """

    init: Callable[..., State]
    run: Callable[..., tuple[State, tuple[Log, ...]]]
    evaluate: Callable[..., Evaluation]


class Rounds(NamedTuple):
    """As Plain, compiled; `run` uses up the state that it is given."""

    init: Any  # compiled functions can also be lowered, which Callable does not say
    run: Any
    evaluate: Any
    place: Callable[[PyTree], PyTree]  # puts a tree on the devices that the rounds run on


class How(NamedTuple):
    """What a program of rounds is made for; none of it is traced. Groups of clients in tuples."""

    algorithm: Algorithm  # as `groups.grouped` makes it
    members: tuple[Algorithm, ...]
    membership: tuple[np.ndarray, ...]  # bool [N] for each group
    task: Task
    federation: Federation
    cohort: int
    calls: int
    dropout: Any
    max_update_norm: Any
    after: bool
    validate_after: bool
    chunk: int
    mesh: Mesh | None


class Shared(NamedTuple):
    """What all clients of a stage have in common."""

    key: jax.Array
    state: State  # without the clients
    data: FederatedData
    t: Any


class Seat(NamedTuple):
    """A place in the cohort; stacked on axis 0."""

    i: jax.Array
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

    return Plain(init, run, evaluate)


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
    """One round of all groups; `state.clients` is a tuple."""
    shared = Shared(key, state._replace(clients=()), data, t)
    ids = _sample(how, key, t)
    met = [_meet(how, g, shared, clients, ids) for g, clients in enumerate(state.clients)]
    cohorts, clients, logs = zip(*met, strict=True)

    def receive(now: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return how.algorithm.receive(State(*now, ()), cohorts)

    anyone = jnp.any(jnp.concatenate([cohort.arrived for cohort in cohorts]))
    now = (state.server, state.rows)
    server, rows = jax.lax.cond(anyone, receive, groups.unchanged, now)
    return Several(State(server, rows, clients), logs)


def _sample(how: How, key: jax.Array, t: Any) -> jax.Array:
    """The ids of a round's cohort, in their order."""
    candidates = np.flatnonzero(how.federation.active).astype(np.int32)
    if how.cohort == len(candidates):
        return jnp.asarray(candidates)
    draws = jax.random.uniform(stage_key(key, SAMPLE, t), (len(candidates),))
    return jnp.sort(jnp.asarray(candidates)[jnp.argsort(draws)[: how.cohort]])


def _seats(how: How, g: int, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cohort's clients of group g in a fixed number of places, and which are taken."""
    candidates = how.membership[g][how.federation.active]
    if candidates.all():
        return ids, jnp.ones(how.cohort, bool)
    own = jnp.asarray(how.membership[g])[ids]
    # At least one, empty, where every client of a group is novel: arrays need a length.
    places = max(1, min(how.cohort, int(np.sum(candidates))))
    order = jnp.argsort(~own, stable=True)[:places]
    return ids[order], own[order]


def _meet(
    how: How, g: int, shared: Shared, clients: PyTree, ids: jax.Array
) -> tuple[Cohort, PyTree, Log]:
    """One group's part of a round: what the server gets, the group's clients after it, the log."""
    ids, present = _seats(how, g, ids)

    def draw(i: jax.Array) -> jax.Array:
        return jax.random.uniform(stage_key(shared.key, DROP, shared.t, i))

    dropped = present & (jax.vmap(draw)(ids) < how.dropout)
    seats = Seat(ids, present, dropped, trees.row(clients, ids))
    work = partial(_work, how.members[g], how.max_update_norm)
    met = map_clients(work, shared, seats, present, how.chunk, how.mesh)

    n = how.federation.clients
    arrived = present & ~dropped & met.fine
    safe = jnp.where(arrived, ids, n)
    counts = jnp.asarray(how.federation.counts, jnp.float32)
    weights = counts.at[safe].get(mode="fill", fill_value=0.0)
    # Zero is as good as anything there, but for 0 · NaN.
    uploads, metrics = (
        trees.where(arrived, part, jax.tree.map(jnp.zeros_like, part))
        for part in (met.upload, met.metrics)
    )
    cohort = Cohort(safe, arrived, weights, met.payload, uploads, shared.t)
    rejected = present & ~dropped & ~met.fine
    log = Log(ids, present, dropped, rejected, metrics, met.down, met.up)
    return cohort, trees.put(clients, safe, met.client), log


def _work(member: Algorithm, max_update_norm: Any, shared: Shared, seat: Seat) -> Met:
    """One client's round: it downloads, trains, and its answer is looked at and billed."""
    key, state, data, t = shared
    i = seat.i
    payload = member.send(state, Visit(i, None, t, stage_key(key, SEND, t, i)))
    visit = Visit(i, client_data(data, i), t, stage_key(key, TRAIN, t, i))
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
    shared = Shared(key, state._replace(clients=()), data, t)
    ids = jnp.arange(how.federation.clients, dtype=jnp.int32)

    def group(g: int) -> Evaluation:
        work = partial(_scores, how, how.members[g])
        own = jnp.asarray(how.membership[g])
        scores = map_clients(work, shared, (ids, state.clients[g]), own, how.chunk, how.mesh)
        return trees.where(own, scores, jax.tree.map(jnp.zeros_like, scores))

    first, *others = map(group, range(len(how.members)))
    for scores in others:
        first = jax.tree.map(jnp.add, first, scores)
    return first


def _scores(how: How, member: Algorithm, shared: Shared, item: tuple[Any, PyTree]) -> Evaluation:
    """One client's."""
    key, state, data, t = shared
    i, client = item
    own = client_data(data, i)
    test = Split(data.test.rows[i], data.test.size[i])
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
