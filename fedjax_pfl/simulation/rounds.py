"""A compiled round, and many rounds in one call: sample, send, train, receive, count.

Chunking, sharding, masking and counting are implemented here and nowhere else. A round needs only
the rows and examples of its cohort (`CohortBatch`), from any store.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.core import groups, offload, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.randomness import DROP, INIT, RECEIVE, SEND, TRAIN, stage_key
from fedjax_pfl.simulation import multiprocess, speeds, spread
from fedjax_pfl.simulation.map_clients import map_clients
from fedjax_pfl.simulation.records import (
    ClientOutcome,
    CohortBatch,
    CompiledRounds,
    Evaluation,
    Log,
    RoundCarry,
    RoundFunctions,
    RoundSpec,
    SharedInputs,
    Slot,
)
from fedjax_pfl.simulation.sampling import sample_slots
from fedjax_pfl.simulation.scoring import evaluate_clients, score_cohort

# On a CPU, `init` is computed once and takes much longer to compile than to compute.
_INIT_OPTIONS = {"xla_backend_optimization_level": 1}


def compile_rounds(functions: RoundFunctions, mesh: Mesh | None = None) -> CompiledRounds:
    """Compiles rounds for one device, or for all devices of a mesh."""
    if functions.spec is not None and functions.spec.is_spread:
        return spread.compile_rounds(functions)
    everywhere = NamedSharding(mesh, P()) if mesh else None
    jit = partial(jax.jit, out_shardings=everywhere)
    is_cpu = jax.default_backend() == "cpu"

    def place(tree: PyTree) -> PyTree:
        return multiprocess.replicate(tree, everywhere) if everywhere else jax.device_put(tree)

    return CompiledRounds(
        init=jit(functions.init, compiler_options=_INIT_OPTIONS if is_cpu else None),
        run=jit(functions.run, donate_argnums=1),
        evaluate=jit(functions.evaluate),
        place=place,
        enter=place,
        everywhere=everywhere,
    )


def make_rounds(algorithm: Algorithm, federation: Federation, **options: Any) -> CompiledRounds:
    """Compiles the rounds of a method; `options` are keyword arguments of `round_functions`."""
    return compile_rounds(round_functions(algorithm, federation, **options), options.get("mesh"))


def round_functions(
    algorithm: Algorithm,
    federation: Federation,
    *,
    cohort: int,
    max_rounds: int = 1,
    sampling: str = "random",
    dropout: float = 0.0,
    client_speeds: speeds.Speeds | None = None,
    max_update_norm: float | None = None,
    evaluate_after: bool = True,
    validate_after: bool = False,
    evaluated_ids: np.ndarray | None = None,
    count_confusion: bool = False,
    chunk: int = 1,
    mesh: Mesh | None = None,
    by_client: bool = False,
) -> RoundFunctions:
    """Returns the rounds and the evaluation of a method as functions to compile.

    Raises UsageError if there are fewer active clients than the cohort has.

    Args:
      algorithm: The method.
      federation: Facts about the clients.
      cohort: Number of active clients that are sampled in a round, without replacement.
      max_rounds: Most rounds in one call of `run`.
      sampling: How the cohort is sampled: "random" or "cyclic", see `sampling`.
      dropout: Probability that a sampled client never returns its update.
      client_speeds: Simulated time of the clients, and the deadline of a round. Default: none.
      max_update_norm: Updates with a larger norm are rejected. Default: updates whose squared norm
        is not finite in float32, from 1.8e19 on.
      evaluate_after: Whether `evaluate` also scores every model after one more local training.
      validate_after: Whether validation examples are scored with that model.
      evaluated_ids: Sorted ids of the clients to evaluate; all others have no examples. Default:
        all clients.
      count_confusion: Whether `evaluate` also counts the confusion matrix of every client's test
        examples.
      chunk: Clients that are vmapped together, see `map_clients`.
      mesh: Devices, see `map_clients`.
      by_client: Whether rows and client-side state are spread over the mesh, see `spread`.
    """
    active = int(np.sum(federation.active))
    if not 1 <= cohort <= active:
        raise UsageError(
            f"clients_per_round is {cohort}, and there are {active} active clients; "
            f"choose 1 to {active}"
        )
    members = groups.group_algorithms(algorithm)
    has_groups = groups.has_groups(algorithm)
    group_of_client = federation.groups if has_groups else np.zeros(federation.clients, int)
    spec = RoundSpec(
        original=algorithm,
        algorithm=groups.as_grouped(algorithm),
        members=members,
        membership=tuple(group_of_client == g for g in range(len(members))),
        federation=federation,
        cohort=cohort,
        max_rounds=max_rounds,
        sampling=sampling,
        dropout=dropout,
        speeds=client_speeds,
        max_update_norm=max_update_norm,
        evaluate_after=evaluate_after,
        validate_after=validate_after,
        evaluated_ids=evaluated_ids,
        count_confusion=count_confusion,
        chunk=chunk,
        mesh=mesh,
        is_spread=by_client and mesh is not None,
    )

    def init(key: jax.Array, start: State | None = None) -> State:
        return algorithm.init(stage_key(key, INIT), start)

    def run(
        key: jax.Array, state: State, data: FederatedData, t: jax.Array, rounds: jax.Array
    ) -> tuple[State, tuple[Log, ...]]:
        state, logs = _run(spec, key, groups.wrap_clients(algorithm, state), data, t, rounds)
        return groups.unwrap_clients(algorithm, state), logs

    def evaluate(key: jax.Array, state: State, data: FederatedData, t: jax.Array) -> Evaluation:
        return evaluate_clients(spec, key, groups.wrap_clients(algorithm, state), data, t)

    return RoundFunctions(
        init=init,
        run=run,
        evaluate=evaluate,
        sample_slots=partial(sample_slots, spec),
        run_cohort=partial(_run_cohort, spec),
        score_cohort=partial(partial, score_cohort, spec),
        spec=spec,
    )


def _run(
    spec: RoundSpec,
    key: jax.Array,
    state: State,
    data: FederatedData,
    t: jax.Array,
    rounds: jax.Array,
) -> RoundCarry:
    """Runs rounds t to t + rounds - 1, a traced number, in a loop.

    Returns the last state, and the logs of each group with a leading axis of `spec.max_rounds`.
    """
    # Traced once: for the shapes of the log, and for the loop.
    run_round = jax.jit(partial(_round, spec), inline=True)
    shapes = jax.eval_shape(run_round, key, state, data, t).logs
    logs = jax.tree.map(lambda s: jnp.zeros((spec.max_rounds, *s.shape), s.dtype), shapes)

    def step(r: jax.Array, carry: RoundCarry) -> RoundCarry:
        result = run_round(key, carry.state, data, t + r)
        logs = jax.tree.map(lambda all_, new: all_.at[r].set(new), carry.logs, result.logs)
        return RoundCarry(result.state, logs)

    return jax.lax.fori_loop(0, rounds, step, RoundCarry(spread.pinned(spec, state), logs))


def _round(
    spec: RoundSpec, key: jax.Array, state: State, data: FederatedData, t: Any
) -> RoundCarry:
    """Runs round `t` with the state of all clients. Returns the new state and a log per group.

    `state.clients` is a tuple with the client-side state [N, ...] of each architecture group.
    """
    cohort_batches = tuple(
        CohortBatch(slots=slots, places=slots.ids, data=data, clients=trees.row(rows, slots.ids))
        for slots, rows in zip(sample_slots(spec, key, t), state.clients, strict=True)
    )
    new, logs = _run_cohort(spec, key, state._replace(clients=()), cohort_batches, t)
    out_of_range = spec.federation.clients
    clients = tuple(
        trees.put(rows, jnp.where(log.arrived, log.ids, out_of_range), new_rows)
        for rows, log, new_rows in zip(state.clients, logs, new.clients, strict=True)
    )
    return RoundCarry(spread.pinned(spec, new._replace(clients=clients)), logs)


def _run_cohort(
    spec: RoundSpec, key: jax.Array, state: State, cohort_batches: tuple[CohortBatch, ...], t: Any
) -> tuple[State, tuple[Log, ...]]:
    """Runs round `t` of a cohort, with a batch for each group and a state without clients.

    Returns the new state, with the new client-side states [K, ...] of each group as `clients`, and
    the logs.
    """
    results = [
        _run_group(spec, g, SharedInputs(key=key, state=state, data=batch.data, t=t), batch)
        for g, batch in enumerate(cohort_batches)
    ]
    cohorts, clients, logs = zip(*results, strict=True)

    def receive(cohorts: Any, server_and_rows: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        server, rows = spec.algorithm.receive(State(*server_and_rows, ()), cohorts)
        return spread.pinned(spec, State(server, rows, ()))[:2]

    def update(server_and_rows: Any, cohorts: Any, any_arrived: jax.Array) -> Any:
        return jax.lax.cond(
            any_arrived, partial(receive, cohorts), groups.unchanged, server_and_rows
        )

    any_arrived = jnp.any(jnp.concatenate([cohort.arrived for cohort in cohorts]))
    if spec.mesh is not None and offload.offloaded_leaves(state.rows):
        # Each device requests rows itself; XLA would let one device request all.
        update = jax.shard_map(update, mesh=spec.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    server, rows = update((state.server, state.rows), cohorts, any_arrived)
    return State(server, rows, clients), logs


def _run_group(
    spec: RoundSpec, g: int, shared: SharedInputs, batch: CohortBatch
) -> tuple[Cohort, PyTree, Log]:
    """Trains the sampled clients of group `g`.

    Returns the `Cohort` that the server receives, the new client-side states [K, ...] and the log.
    """
    ids, present = batch.slots

    def uniform(i: jax.Array) -> jax.Array:
        return jax.random.uniform(stage_key(shared.key, DROP, shared.t, i))

    dropped = present & (jax.vmap(uniform)(ids) < spec.dropout)
    slots = Slot(i=ids, place=batch.places, present=present, dropped=dropped, client=batch.clients)
    if spec.speeds is not None:
        slots = slots._replace(max_steps=speeds.steps_that_fit(spec.speeds, shared, ids))
    # Payloads are computed on the devices that store the rows, for many clients at once.
    outcomes = map_clients(
        partial(_train, spec, spec.members[g]),
        shared._replace(state=None),
        slots,
        present,
        spec.chunk,
        spec.mesh,
        partial(_send, spec.members[g]),
        shared._replace(data=None),
        is_spread=spec.is_spread and bool(jax.tree.leaves(shared.state.rows)),
    )

    up, seconds, late = outcomes.up, None, None
    if spec.speeds is not None:
        late, missing, seconds = speeds.arrivals(spec.speeds, shared, slots, outcomes)
        dropped |= missing
        up = {layer: jnp.where(dropped, 0, count) for layer, count in up.items()}
    arrived = present & ~dropped & outcomes.is_accepted
    safe_ids = jnp.where(arrived, ids, spec.federation.clients)
    counts = jnp.asarray(spec.federation.counts, jnp.float32)
    uploads, metrics = outcomes.upload, outcomes.metrics
    if spec.speeds is not None:  # updates after the deadline
        uploads, metrics = trees.zero_unless(arrived, (uploads, metrics))
    weights = counts.at[safe_ids].get(mode="fill", fill_value=0.0)
    if slots.max_steps is not None:
        uploads = speeds.normalised(uploads, outcomes.payload, weights, slots.max_steps)
    cohort = Cohort(
        ids=safe_ids,
        arrived=arrived,
        weights=weights,
        payloads=outcomes.payload,
        uploads=uploads,
        t=shared.t,
        key=stage_key(shared.key, RECEIVE, shared.t),
    )
    log = Log(
        ids=ids,
        present=present,
        dropped=dropped,
        rejected=present & ~dropped & ~outcomes.is_accepted,
        metrics=metrics,
        down=outcomes.down,
        up=up,
        seconds=seconds,
        late=late,
    )
    return cohort, outcomes.client, log


def _send(member: Algorithm, shared: SharedInputs, slot: Slot) -> PyTree:
    """Returns the payload of the client in `slot`; `member` is the algorithm of its group."""
    key, state, _, t = shared
    return member.send(
        state, ClientContext(i=slot.i, data=None, t=t, key=stage_key(key, SEND, t, slot.i))
    )


def _train(
    spec: RoundSpec, member: Algorithm, shared: SharedInputs, slot_and_payload: tuple[Slot, PyTree]
) -> ClientOutcome:
    """Trains one client, checks its update and counts its bytes.

    Args:
      spec: Facts about the rounds.
      member: Algorithm of the client's group.
      shared: Inputs that all clients share; its state is not read.
      slot_and_payload: The client and its download.
    """
    (key, _, data, t), (slot, payload) = shared, slot_and_payload
    i = slot.i
    ctx = ClientContext(
        i=i,
        data=client_data(data, slot.place),
        t=t,
        key=stage_key(key, TRAIN, t, i),
        max_steps=slot.max_steps,
    )
    upload, variables, client, metrics = member.train(payload, slot.client, ctx)
    is_accepted = trees.all_finite((upload, variables, client))
    # Squares of larger changes overflow, and the server's state would soon not be finite.
    squared_norm = trees.squared_norm(trees.change(payload, upload))
    is_accepted &= jnp.isfinite(squared_norm)
    if spec.max_update_norm is not None:
        is_accepted &= squared_norm <= jnp.square(jnp.float32(spec.max_update_norm))
    traffic = member.traffic(payload, upload)
    # Here, because a copy of all uploads of a cohort takes long. Otherwise 0 * NaN would spread.
    arrived = slot.present & ~slot.dropped & is_accepted
    upload, metrics = trees.zero_unless(arrived, (upload, metrics))
    return ClientOutcome(
        payload=payload,
        upload=upload,
        client=client,
        metrics=metrics,
        is_accepted=is_accepted,
        down=_counted(traffic.down, slot.present),
        up=_counted(traffic.up, slot.present & ~slot.dropped),
    )


def _counted(traffic: dict[str, Any], is_counted: jax.Array) -> dict[str, jax.Array]:
    """Returns bytes by layer, `traffic`, as int32 scalars; zeros unless `is_counted`, a bool [].

    Raises UsageError for a layer of 2 GiB or more.
    """
    for layer, count in traffic.items():
        if isinstance(count, int) and count >= 2**31:
            raise UsageError(f"layer {layer} has {count:,} bytes; at most 2**31 - 1 can be counted")
    return {layer: jnp.where(is_counted, jnp.int32(count), 0) for layer, count in traffic.items()}
