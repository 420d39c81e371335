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

from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.core.groups import members
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


def _counted(bill: dict[str, Any], counts: jax.Array) -> dict[str, jax.Array]:
    """A client's bill as int32, zero where it does not count."""
    for layer, amount in bill.items():
        if isinstance(amount, int) and amount >= 2**31:
            raise UsageError(f"layer {layer} has {amount:,} bytes; at most 2**31 - 1 can be billed")
    return {layer: jnp.where(counts, jnp.int32(amount), 0) for layer, amount in bill.items()}


def compiled(plain: Plain, mesh: Mesh | None = None) -> Rounds:
    """Rounds on one device, or on all of a mesh."""
    everywhere = NamedSharding(mesh, P()) if mesh else None
    jit = partial(jax.jit, out_shardings=everywhere)
    place = lambda tree: multiprocess.put(tree, everywhere) if everywhere else jax.device_put(tree)
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
    n = federation.clients
    candidates = np.flatnonzero(federation.active)
    groups = members(algorithm)
    if not 1 <= cohort <= len(candidates):
        raise UsageError(
            f"clients_per_round is {cohort}, and there are {len(candidates)} active clients; "
            f"choose 1 to {len(candidates)}"
        )

    def sample(key: jax.Array, t: Any) -> jax.Array:
        if cohort == len(candidates):
            return jnp.asarray(candidates, jnp.int32)
        draws = jax.random.uniform(stage_key(key, SAMPLE, t), (len(candidates),))
        return jnp.sort(jnp.asarray(candidates, jnp.int32)[jnp.argsort(draws)[:cohort]])

    def seats(ids: jax.Array, g: int) -> tuple[jax.Array, jax.Array]:
        """The cohort's clients of group g in a fixed number of slots, and which are taken."""
        if len(groups) == 1:
            return ids, jnp.ones(cohort, bool)
        own = jnp.asarray(federation.groups == g)[ids]
        # At least one, empty, where every client of a group is novel: arrays need a length.
        slots = max(1, min(cohort, int(np.sum(federation.groups[candidates] == g))))
        order = jnp.argsort(~own, stable=True)[:slots]
        return ids[order], own[order]

    def meet(member: Algorithm, key: jax.Array, state: State, clients: PyTree, data: Any, t: Any,
             ids: jax.Array, present: jax.Array) -> Any:  # fmt: skip
        """One group's cohort in one round: payloads, clean uploads, clients, who arrived, log."""
        draw = jax.vmap(lambda i: jax.random.uniform(stage_key(key, DROP, t, i)))(ids)
        dropped = present & (draw < dropout)

        def work(shared: PyTree, item: PyTree) -> Any:
            key, server, rows, data, t = shared
            i, present, dropped, client = item
            payload = member.send(server, rows, i, t, stage_key(key, SEND, t, i))
            upload, trained, client, metrics = member.train(
                payload, client, client_data(data, i), t, stage_key(key, TRAIN, t, i)
            )
            fine = trees.all_finite((upload, trained, client))
            if max_update_norm is not None:
                moved = trees.squared_norm(trees.change(payload, upload))
                fine &= moved <= jnp.square(jnp.float32(max_update_norm))
            bill = member.traffic(payload, upload)
            down = _counted(bill.down, present)
            up = _counted(bill.up, present & ~dropped)
            return payload, upload, client, metrics, fine, down, up

        shared = (key, state.server, state.rows, data, t)
        items = (ids, present, dropped, trees.row(clients, ids))
        payloads, uploads, after, metrics, fine, down, up = map_clients(
            work, shared, items, present, chunk, mesh
        )
        arrived = present & ~dropped & fine
        uploads = trees.where(arrived, uploads, jax.tree.map(jnp.zeros_like, uploads))
        metrics = trees.where(arrived, metrics, jax.tree.map(jnp.zeros_like, metrics))
        clients = trees.put(clients, jnp.where(arrived, ids, n), after)
        log = Log(ids, present, dropped, present & ~dropped & ~fine, metrics, down, up)
        return payloads, uploads, clients, arrived, log

    @partial(jax.jit, inline=True)  # traced once, for the log's shapes and for the loop
    def one_round(
        key: jax.Array, state: State, data: FederatedData, t: Any
    ) -> tuple[State, tuple[Log, ...]]:
        ids = sample(key, t)
        clients = (state.clients,) if len(groups) == 1 else state.clients
        met = [
            meet(member, key, state, clients[g], data, t, *seats(ids, g))
            for g, member in enumerate(groups)
        ]
        payloads, uploads, clients, arrived, logs = zip(*met, strict=True)
        safe = tuple(jnp.where(here, log.ids, n) for here, log in zip(arrived, logs, strict=True))
        cohorts = (safe, arrived, payloads, uploads)
        alone = len(groups) == 1

        def receive(server_rows: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            return algorithm.receive(*server_rows, *(c[0] if alone else c for c in cohorts), t)

        anyone = jnp.any(jnp.concatenate(arrived))
        now = (state.server, state.rows)
        server, rows = jax.lax.cond(anyone, receive, lambda same: same, now)
        return State(server, rows, clients[0] if alone else clients), logs

    def run(
        key: jax.Array, state: State, data: FederatedData, t: jax.Array, rounds: jax.Array
    ) -> tuple[State, tuple[Log, ...]]:
        shapes = jax.eval_shape(one_round, key, state, data, t)[1]
        logs = jax.tree.map(lambda s: jnp.zeros((calls, *s.shape), s.dtype), shapes)

        def step(r: jax.Array, carry: Any) -> Any:
            state, logs = carry
            state, log = one_round(key, state, data, t + r)
            return state, jax.tree.map(lambda whole, new: whole.at[r].set(new), logs, log)

        return jax.lax.fori_loop(0, rounds, step, (state, logs))

    def evaluate(key: jax.Array, state: State, data: FederatedData, t: jax.Array) -> Evaluation:
        all_clients = (state.clients,) if len(groups) == 1 else state.clients
        ids = jnp.arange(n, dtype=jnp.int32)
        total: Any = None
        for g, member in enumerate(groups):

            def work(shared: PyTree, item: PyTree, member: Algorithm = member) -> Evaluation:
                key, server, rows, data, t = shared
                i, client = item
                own = client_data(data, i)
                test = Split(data.test.rows[i], data.test.size[i])
                served = member.personal(
                    server, rows, client, i, own, t, stage_key(key, PERSONAL, t, i)
                )
                score = partial(local_training.evaluate, member.predict, data=own, task=task)
                before, validation = score(served, split=test), score(served, split=own.validation)
                if not after:
                    return Evaluation(before, validation, None)
                payload = member.send(server, rows, i, t, stage_key(key, SEND, t, i))
                train_key = stage_key(key, TRAIN, t, i)
                _, trained, _, _ = member.train(payload, client, own, t, train_key)
                if validate_after:
                    validation = score(trained, split=own.validation)
                return Evaluation(before, validation, score(trained, split=test))

            own_group = jnp.asarray(federation.groups == g) if len(groups) > 1 else ids >= 0
            shared = (key, state.server, state.rows, data, t)
            scores = map_clients(work, shared, (ids, all_clients[g]), own_group, chunk, mesh)
            zeros = jax.tree.map(jnp.zeros_like, scores)
            scores = trees.where(own_group, scores, zeros)
            total = scores if total is None else jax.tree.map(jnp.add, total, scores)
        return total

    init = lambda key, start=None: algorithm.init(stage_key(key, INIT), start)
    return Plain(init, run, evaluate)
