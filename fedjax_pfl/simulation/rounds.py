"""A compiled round, and many of them in one call: sample, send, train, receive, count.

Sampling, chunking, sharding, masking and counting live here and nowhere else. A round is computed
from its cohort's own rows and examples (`CohortBatch`), wherever those of all clients lie.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.core import groups, offload, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.randomness import DROP, INIT, SAMPLE, SEND, TRAIN, stage_key
from fedjax_pfl.simulation import multiprocess, spread
from fedjax_pfl.simulation.map_clients import map_clients
from fedjax_pfl.simulation.records import (
    CohortBatch,
    CompiledRounds,
    Evaluation,
    Log,
    RoundFunctions,
    RoundSpec,
    SharedInputs,
    Slots,
)
from fedjax_pfl.simulation.scoring import evaluation, score_party


class Slot(NamedTuple):
    """A place in the cohort; stacked on axis 0."""

    i: jax.Array
    place: jax.Array
    present: jax.Array
    dropped: jax.Array
    client: PyTree


class ClientOutcome(NamedTuple):
    """What a client's round comes to; stacked on axis 0."""

    payload: PyTree
    upload: PyTree
    client: PyTree
    metrics: dict[str, jax.Array]
    fine: jax.Array  # bool: finite, and not too large
    down: dict[str, jax.Array]
    up: dict[str, jax.Array]


class RoundCarry(NamedTuple):
    """The carry of `run`."""

    state: State
    logs: tuple[Log, ...]


def compiled(plain: RoundFunctions, mesh: Mesh | None = None) -> CompiledRounds:
    """Rounds on one device, or on all of a mesh."""
    if plain.spec is not None and plain.spec.spread:
        return spread.compiled(plain)
    everywhere = NamedSharding(mesh, P()) if mesh else None
    jit = partial(jax.jit, out_shardings=everywhere)

    def place(tree: PyTree) -> PyTree:
        return multiprocess.put(tree, everywhere) if everywhere else jax.device_put(tree)

    run = jit(plain.run, donate_argnums=1)
    return CompiledRounds(jit(plain.init), run, jit(plain.evaluate), place, place, everywhere)


def make_rounds(algorithm: Algorithm, federation: Federation, **spec: Any) -> CompiledRounds:
    """Compile an algorithm's rounds and its evaluation; `spec` as for `plain_rounds`."""
    return compiled(plain_rounds(algorithm, federation, **spec), spec.get("mesh"))


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
) -> RoundFunctions:
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
    members = groups.group_algorithms(algorithm)
    several = groups.has_groups(algorithm)
    of_group = federation.groups if several else np.zeros(federation.clients, int)
    spec = RoundSpec(
        algorithm,
        groups.as_grouped(algorithm),
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
        state, logs = _run(spec, key, groups.wrap_clients(algorithm, state), data, t, rounds)
        return groups.unwrap_clients(algorithm, state), logs

    def evaluate(key: jax.Array, state: State, data: FederatedData, t: jax.Array) -> Evaluation:
        return evaluation(spec, key, groups.wrap_clients(algorithm, state), data, t)

    return RoundFunctions(
        init,
        run,
        evaluate,
        partial(_seats, spec),
        partial(_meet, spec),
        partial(partial, score_party, spec),
        spec,
    )


def _run(
    spec: RoundSpec,
    key: jax.Array,
    state: State,
    data: FederatedData,
    t: jax.Array,
    rounds: jax.Array,
) -> RoundCarry:
    # Traced once, for the shapes of the log and for the loop.
    one_round = jax.jit(partial(_round, spec), inline=True)
    shapes = jax.eval_shape(one_round, key, state, data, t).logs
    logs = jax.tree.map(lambda s: jnp.zeros((spec.calls, *s.shape), s.dtype), shapes)

    def step(r: jax.Array, so_far: RoundCarry) -> RoundCarry:
        now = one_round(key, so_far.state, data, t + r)
        written = jax.tree.map(lambda whole, new: whole.at[r].set(new), so_far.logs, now.logs)
        return RoundCarry(now.state, written)

    return jax.lax.fori_loop(0, rounds, step, RoundCarry(spread.pinned(spec, state), logs))


def _round(
    spec: RoundSpec, key: jax.Array, state: State, data: FederatedData, t: Any
) -> RoundCarry:
    """One round, with all clients at hand; `state.clients` is a tuple."""
    each = _seats(spec, key, t)
    cohort_batches = tuple(
        CohortBatch(slots, slots.ids, data, trees.row(clients, slots.ids))
        for slots, clients in zip(each, state.clients, strict=True)
    )
    now, logs = _meet(spec, key, state._replace(clients=()), cohort_batches, t)
    n = spec.federation.clients
    clients = tuple(
        trees.put(whole, jnp.where(log.arrived, log.ids, n), new)
        for whole, log, new in zip(state.clients, logs, now.clients, strict=True)
    )
    return RoundCarry(spread.pinned(spec, now._replace(clients=clients)), logs)


def _meet(
    spec: RoundSpec, key: jax.Array, state: State, cohort_batches: tuple[CohortBatch, ...], t: Any
) -> tuple[State, tuple[Log, ...]]:
    """One round of the parties: the state with their clients after it, and the logs."""
    outcomes = [
        _meet_group(spec, g, SharedInputs(key, state, cohort_batch.data, t), cohort_batch)
        for g, cohort_batch in enumerate(cohort_batches)
    ]
    cohorts, clients, logs = zip(*outcomes, strict=True)

    def receive(cohorts: Any, now: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        server, rows = spec.algorithm.receive(State(*now, ()), cohorts)
        return spread.pinned(spec, State(server, rows, ()))[:2]

    anyone = jnp.any(jnp.concatenate([cohort.arrived for cohort in cohorts]))
    now = (state.server, state.rows)

    def received(now: Any, cohorts: Any, anyone: jax.Array) -> tuple[PyTree, PyTree]:
        return jax.lax.cond(anyone, partial(receive, cohorts), groups.unchanged, now)

    if spec.mesh is not None and offload.offloaded_leaves(state.rows):
        # Each device asks for rows by itself: XLA would let one ask for all.
        received = jax.shard_map(
            received, mesh=spec.mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
    server, rows = received(now, cohorts, anyone)
    return State(server, rows, clients), logs


def _sample(spec: RoundSpec, key: jax.Array, t: Any) -> jax.Array:
    """The ids of a round's cohort, in their order."""
    candidates = np.flatnonzero(spec.federation.active).astype(np.int32)
    if spec.cohort == len(candidates):
        return jnp.asarray(candidates)
    draws = jax.random.uniform(stage_key(key, SAMPLE, t), (len(candidates),))
    _, lowest = jax.lax.top_k(
        -draws, spec.cohort
    )  # of two alike the first, as a sort would have it
    return jnp.sort(jnp.asarray(candidates)[lowest])


def _seats(spec: RoundSpec, key: jax.Array, t: Any) -> tuple[Slots, ...]:
    """Those of each group."""
    ids = _sample(spec, key, t)
    return tuple(_seats_of_group(spec, g, ids) for g in range(len(spec.members)))


def _seats_of_group(spec: RoundSpec, g: int, ids: jax.Array) -> Slots:
    """The cohort's clients of group g in a fixed number of places."""
    candidates = spec.membership[g][spec.federation.active]
    if candidates.all():
        return Slots(ids, jnp.ones(spec.cohort, bool))
    own = jnp.asarray(spec.membership[g])[ids]
    # At least one, empty, where every client of a group is novel: arrays need a length.
    places = max(1, min(spec.cohort, int(np.sum(candidates))))
    order = jnp.argsort(~own, stable=True)[:places]
    return Slots(ids[order], own[order])


def _meet_group(
    spec: RoundSpec, g: int, shared: SharedInputs, cohort_batch: CohortBatch
) -> tuple[Cohort, PyTree, Log]:
    """One group's part of a round: what the server gets, the group's clients after it, the log."""
    ids, present = cohort_batch.slots

    def draw(i: jax.Array) -> jax.Array:
        return jax.random.uniform(stage_key(shared.key, DROP, shared.t, i))

    dropped = present & (jax.vmap(draw)(ids) < spec.dropout)
    slots = Slot(ids, cohort_batch.places, present, dropped, cohort_batch.clients)
    send, train = partial(_send, spec.members[g]), partial(_train, spec, spec.members[g])
    if spec.spread and jax.tree.leaves(shared.state.rows):
        # What reads the rows of all clients is computed where they are.
        known, before = shared._replace(state=None), partial(send, shared)
        outcomes = map_clients(train, known, slots, present, spec.chunk, spec.mesh, before)
    else:

        def work(shared: SharedInputs, slot: Slot) -> ClientOutcome:
            return train(shared, (slot, send(shared, slot)))

        outcomes = map_clients(work, shared, slots, present, spec.chunk, spec.mesh)

    arrived = present & ~dropped & outcomes.fine
    safe = jnp.where(arrived, ids, spec.federation.clients)
    counts = jnp.asarray(spec.federation.counts, jnp.float32)
    weights = counts.at[safe].get(mode="fill", fill_value=0.0)
    # Zero is as good as anything there, but for 0 · NaN.
    uploads, metrics = (
        trees.where(arrived, part, jax.tree.map(jnp.zeros_like, part))
        for part in (outcomes.upload, outcomes.metrics)
    )
    cohort = Cohort(safe, arrived, weights, outcomes.payload, uploads, shared.t)
    rejected = present & ~dropped & ~outcomes.fine
    return (
        cohort,
        outcomes.client,
        Log(ids, present, dropped, rejected, metrics, outcomes.down, outcomes.up),
    )


def _send(member: Algorithm, shared: SharedInputs, slot: Slot) -> PyTree:
    """What a client downloads."""
    key, state, _, t = shared
    return member.send(state, ClientContext(slot.i, None, t, stage_key(key, SEND, t, slot.i)))


def _train(
    spec: RoundSpec, member: Algorithm, shared: SharedInputs, sent: tuple[Slot, PyTree]
) -> ClientOutcome:
    """The rest of a client's round: it trains, and its answer is looked at and billed."""
    (key, _, data, t), (slot, payload) = shared, sent
    i = slot.i
    ctx = ClientContext(i, client_data(data, slot.place), t, stage_key(key, TRAIN, t, i))
    upload, variables, client, metrics = member.train(payload, slot.client, ctx)
    fine = trees.all_finite((upload, variables, client))
    # Squares of a change this large overflow, and the server's state would soon not be finite.
    moved = trees.squared_norm(trees.change(payload, upload))
    fine &= jnp.isfinite(moved)
    if spec.max_update_norm is not None:
        fine &= moved <= jnp.square(jnp.float32(spec.max_update_norm))
    bill = member.traffic(payload, upload)
    down = _counted(bill.down, slot.present)
    up = _counted(bill.up, slot.present & ~slot.dropped)
    return ClientOutcome(payload, upload, client, metrics, fine, down, up)


def _counted(bill: dict[str, Any], counts: jax.Array) -> dict[str, jax.Array]:
    """A client's bill as int32, zero where it does not count."""
    for layer, amount in bill.items():
        if isinstance(amount, int) and amount >= 2**31:
            raise UsageError(f"layer {layer} has {amount:,} bytes; at most 2**31 - 1 can be billed")
    return {layer: jnp.where(counts, jnp.int32(amount), 0) for layer, amount in bill.items()}
