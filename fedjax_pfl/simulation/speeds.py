"""Simulated time: how long each client takes in a round, and which clients miss its deadline.

A client takes d / b + τ s + u / b seconds: d and u are the bytes of its download and upload, b its
bandwidth, τ its local steps and s its seconds per step. With a median m and a spread σ, s is
log-normal: m exp(σ z) with z standard normal, drawn once per client from the seed.

The server waits for the last client that returns its update. If an update does not come, it waits
until the deadline or, without one, does not wait for that client.

A late client is missing or, with partial work, stops after the steps that fit before the deadline;
with none it is missing. Updates of different lengths are averaged as in FedNova (Wang et al.,
Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020). With
weights p_k, steps τ_k and τ_eff = Σ p_k τ_k, the server's model w changes by τ_eff Σ p_k Δ_k / τ_k.
That is the mean of the uploads w + (τ_eff / τ_k) Δ_k, FedNova's for plain SGD; momentum, FedProx's
penalty and schedules do not change τ_k here. Statistics of BatchNorm are averaged.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import batches, groups, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.example_noise import Fit, record_fits
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.randomness import SPEED, stage_key
from fedjax_pfl.simulation.records import ClientOutcome, Log, SharedInputs, Slot


class Speeds(NamedTuple):
    """Simulated time of all clients, and the deadline of a round."""

    steps: np.ndarray  # int [N]: local steps of each client in a round
    step_seconds: Any  # seconds per step: the median of the clients, or float [N]
    spread: float = 0.0  # standard deviation of the logarithm of the seconds around the median
    bandwidth: Any = np.inf  # bytes per second in each direction, of all clients or float [N]
    deadline: float = np.inf  # seconds from the start of a round; infinite: none
    free_rounds: int = 0  # number of first rounds without a download
    partial_bytes: tuple[int, int] | None = None  # down and up of a client; None: no partial work


def local_fits(algorithm: Algorithm, data: FederatedData) -> list[Fit]:
    """Returns the local trainings of a client in a round; with groups, of one of the first group.

    Trainings in a loop, or of several models at once, count once. Nothing is compiled.
    """

    def run(state: State, key: jax.Array, i: jax.Array, data: FederatedData) -> Any:
        member = groups.group_algorithms(algorithm)[0]
        ctx = ClientContext(i=i, data=None, t=i, key=key, max_steps=i)
        payload = member.send(state._replace(clients=()), ctx)
        client = trees.row(state.clients[0], i)
        return member.train(payload, client, ctx._replace(data=client_data(data, i)))

    key = jax.random.key(0)
    # Not recorded: a transform may trace a round to learn the shapes of its state.
    state = jax.eval_shape(groups.as_grouped(algorithm).init, key)
    with record_fits() as fits:
        jax.eval_shape(run, state, key, jnp.int32(0), data)
    return fits


def round_steps(algorithm: Algorithm, federation: Federation, data: FederatedData) -> np.ndarray:
    """Returns the local steps of each client in a round, over all its `local_fits`, int [N]."""
    steps = [
        np.asarray(batches.local_steps(fit.training, federation.counts, fit.training.batch_size))
        for fit in local_fits(algorithm, data)
    ]
    return sum(steps, np.zeros(federation.clients, int))


def method_speeds(
    algorithm: Algorithm,
    federation: Federation,
    data: FederatedData,
    *,
    step_seconds: Any,
    bandwidth: Any = None,
    deadline: float | None = None,
) -> Speeds | None:
    """Returns the speeds of clients that train with a method, or None without `step_seconds`.

    Raises UsageError for values that are not positive or not one per client, and for `bandwidth` or
    `deadline` without `step_seconds`.

    Args:
      algorithm: The method.
      federation: Facts about the clients.
      data: Their examples; only shapes matter.
      step_seconds: Seconds of a local step of every client, or of each, [N].
      bandwidth: Bytes per second in each direction, likewise. None: transfers take no time.
      deadline: Longest round in seconds. None: no limit.
    """
    if step_seconds is None:
        for name, value in (("bandwidth", bandwidth), ("deadline", deadline)):
            if value is not None:
                raise UsageError(f"{name} needs step_seconds; add it, such as step_seconds=0.1")
        return None
    clients = federation.clients
    return Speeds(
        steps=round_steps(algorithm, federation, data),
        step_seconds=_positive("step_seconds", step_seconds, clients),
        bandwidth=np.inf if bandwidth is None else _positive("bandwidth", bandwidth, clients),
        deadline=np.inf if deadline is None else float(_positive("deadline", deadline)),
    )


def _positive(name: str, value: Any, clients: int | None = None) -> np.ndarray:
    """Returns one number, or one per client if `clients` is their number, as float32.

    Raises UsageError for other shapes and for what is no number above 0.
    """
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {value!r}; it must be a number above 0") from None
    if array.shape not in ((), (clients,)):
        allowed = "one number" if clients is None else f"one number, or {clients}, one per client"
        raise UsageError(f"{name} has shape {list(array.shape)}; give {allowed}")
    invalid = array[~(np.isfinite(array) & (array > 0))]
    if len(invalid):
        raise UsageError(f"{name} is {invalid[0]:g}; it must be a number above 0")
    return array


class Arrivals(NamedTuple):
    """Timing of the clients of a round, in K slots."""

    late: jax.Array  # bool [K]: missed the deadline
    missing: jax.Array  # bool [K]: the server gets no update
    seconds: jax.Array  # float32 [K]: time that the server waits for the client; 0 in empty slots


def step_seconds(speeds: Speeds, key: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the seconds per local step of the clients `ids`, float32 [K]. `key`: of the run."""
    if np.ndim(speeds.step_seconds):
        return _of(speeds.step_seconds, ids)
    draws = jax.vmap(lambda i: jax.random.normal(stage_key(key, SPEED, 0, i)))(ids)
    return speeds.step_seconds * jnp.exp(speeds.spread * draws)


def steps_that_fit(speeds: Speeds, shared: SharedInputs, ids: jax.Array) -> jax.Array | None:
    """Returns the steps before the deadline, at most a whole round, int32 [K].

    Returns None if late clients do no partial work. `ids` are the sampled clients.
    """
    if speeds.partial_bytes is None:
        return None
    down, up = (jnp.full(ids.shape, count, jnp.float32) for count in speeds.partial_bytes)
    left = speeds.deadline - _transfer(speeds, shared, ids, down, up)
    steps = jnp.floor(left / step_seconds(speeds, shared.key, ids))
    return jnp.clip(steps, 0, _of(speeds.steps, ids)).astype(jnp.int32)


def arrivals(
    speeds: Speeds, shared: SharedInputs, slots: Slot, outcomes: ClientOutcome
) -> Arrivals:
    """Returns who misses the deadline, and how long the server waits for each client.

    Args:
      speeds: Speeds of all clients.
      shared: Inputs of the round.
      slots: The sampled clients, leaves [K, ...].
      outcomes: Their results, with the bytes that they transfer.
    """
    ids, steps = slots.i, _of(speeds.steps, slots.i)
    down, up = (_total(part, ids) for part in (outcomes.down, outcomes.up))
    transfer = _transfer(speeds, shared, ids, down, up)
    seconds = transfer + steps * step_seconds(speeds, shared.key, ids)
    late = missing = slots.present & ~slots.dropped & (seconds > speeds.deadline)
    if slots.max_steps is not None:
        done = slots.max_steps.astype(jnp.float32)
        work = done * step_seconds(speeds, shared.key, ids)
        seconds = jnp.minimum(transfer + work, speeds.deadline)
        late = slots.present & ~slots.dropped & (done < steps)
        missing = late & (done == 0)
    missing |= slots.dropped
    wait = jnp.where(missing, speeds.deadline if np.isfinite(speeds.deadline) else 0.0, seconds)
    return Arrivals(late=late, missing=missing, seconds=jnp.where(slots.present, wait, 0.0))


def normalised(uploads: PyTree, payloads: PyTree, weights: jax.Array, steps: jax.Array) -> PyTree:
    """Returns uploads whose mean by `weights` is the update of FedNova.

    If all clients with a weight did equally many steps, these are the uploads themselves.

    Args:
      uploads: Variables of the clients, leaves [K, ...].
      payloads: Variables that they downloaded.
      weights: float32 [K]; 0 for absent clients.
      steps: int32 [K]: local steps of each client.
    """
    counts = jnp.maximum(steps, 1).astype(jnp.float32)
    share = weights / jnp.maximum(jnp.sum(weights), 1.0)
    most = jnp.max(jnp.where(weights > 0, counts, 0.0))
    is_unchanged = (weights == 0) | jnp.all((weights == 0) | (counts == most))
    factors = jnp.where(is_unchanged, 1.0, jnp.sum(share * counts) / counts)

    def scale(upload: jax.Array, payload: jax.Array) -> jax.Array:
        factor = factors.reshape(-1, *[1] * (upload.ndim - 1))
        old, change = (leaf.astype(jnp.float32) for leaf in (payload, upload - payload))
        return jnp.where(factor == 1.0, upload, (old + factor * change).astype(upload.dtype))

    return {**uploads, "params": jax.tree.map(scale, uploads["params"], payloads["params"])}


def _transfer(
    speeds: Speeds, shared: SharedInputs, ids: jax.Array, down: jax.Array, up: jax.Array
) -> jax.Array:
    """Returns the seconds of the transfers of `down` and `up` bytes, all float32 [K]."""
    counted = jnp.where(shared.t < speeds.free_rounds, 0.0, down)
    return (counted + up) / _of(speeds.bandwidth, ids)


def _of(values: Any, ids: jax.Array) -> jax.Array:
    """Returns the values of the clients `ids`, float32 [K]; `values` is one number or [N]."""
    array = jnp.asarray(values, jnp.float32)
    return array[ids] if array.ndim else jnp.broadcast_to(array, ids.shape)


def _total(counts: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
    """Returns the bytes of all layers, float32 [K]: in int32, their sum could overflow."""
    zero = jnp.zeros(ids.shape, jnp.float32)
    return sum((count.astype(jnp.float32) for count in counts.values()), zero)


def elapsed(logs: Sequence[Log], rounds: int, start: float | None) -> float | None:
    """Returns the simulated seconds after the first `rounds` rounds of one call's logs.

    Rounds are added in order, so the sum does not depend on how calls divide the rounds.

    Args:
      logs: One log per architecture group, arrays [rounds or more, K].
      rounds: Number of rounds to count.
      start: Simulated seconds before the call; None before the first round.

    Returns:
      The seconds, or None if no time is simulated.
    """
    if any(log.seconds is None for log in logs):
        return None
    total = start or 0.0
    for r in range(rounds):
        total += max(float(np.max(log.seconds[r])) for log in logs)
    return total


def late(logs: Sequence[Log], rounds: int) -> int:
    """Returns how many updates missed the deadline in the first `rounds` rounds of the logs."""
    return sum(int(np.sum(log.late[:rounds])) for log in logs if log.late is not None)
