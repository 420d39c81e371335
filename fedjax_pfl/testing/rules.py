"""The rules that every method keeps, each a function of a `Subject`.

The rules of a subject share five programs: `init`, `run`, one client's round, its personal model
and `receive`. What differs between rules (data, round, number of rounds) is traced. Everything else
is computed in NumPy, because outside a program JAX compiles each operation for each shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    State,
)
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.randomness import PERSONAL, RECEIVE, SEND, TRAIN, stage_key
from fedjax_pfl.core.shape_check import check_shapes
from fedjax_pfl.runs import checkpoints
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.records import CompiledRounds, Log
from fedjax_pfl.simulation.rounds import make_rounds
from fedjax_pfl.testing import example

SEED = 7
ROUNDS = 6
WARM_UP = 2  # rounds before the one that is examined, so that no two clients are alike
# Five of six clients in chunks of three, of which one slot stays empty, and some drop out.
OPTIONS = {"cohort": 5, "max_rounds": ROUNDS, "chunk": 3, "dropout": 0.3}
TOLERANCES = {"rtol": 1e-5, "atol": 1e-6}
ALL_CLIENTS = np.arange(example.CLIENTS)


def make_key() -> jax.Array:
    """Returns the key of all runs. A constant would start JAX on import."""
    return jax.random.key(SEED)


class World(NamedTuple):
    """The data of a federation like `example.vectors`, and the same with other padding."""

    data: FederatedData  # examples of all clients
    federation: Federation  # facts about the clients
    wide: FederatedData  # with nine more columns of padding for every client
    refilled: FederatedData  # with other values in the padding


def make_world(federated: Callable[..., tuple[FederatedData, Federation]]) -> World:
    """Returns the data that `federated(extra=..., filler=...)` makes with three paddings."""
    data, federation = federated()
    return World(
        data=data,
        federation=federation,
        wide=federated(extra=9)[0],
        refilled=federated(filler=11)[0],
    )


@dataclass(eq=False)
class Subject:
    """A method on a small federation, and the programs and results that its rules share."""

    name: str  # name of the method, for messages
    make: Callable[..., Algorithm]  # federation -> Algorithm
    world: World  # the federation
    rows_of_absent_clients_change: bool = False  # if so, this is not tested

    @cached_property
    def algorithm(self) -> Algorithm:
        """Returns the method under test."""
        return self.make(self.world.federation)

    @cached_property
    def traces(self) -> list[int]:
        """Returns a list that grows each time `train` is traced in `rounds`."""
        return []

    @cached_property
    def rounds(self) -> CompiledRounds:
        """Returns the compiled rounds, which append to `traces` when `train` is traced."""

        def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
            self.traces.append(1)
            return self.algorithm.train(payload, client, ctx)

        counting = self.algorithm._replace(train=train)
        return make_rounds(counting, self.world.federation, **OPTIONS)

    def run(self, n: int, t: int = 0, state: Any = None, data: Any = None) -> tuple[State, Log]:
        """Runs rounds t to t + n - 1. Returns the state and their log, in NumPy.

        Default of `state`: the initial state; of `data`: the world's data.
        """
        state = self.rounds.init(make_key()) if state is None else self.rounds.place(state)
        data = self.world.data if data is None else data
        state, (log,) = self.rounds.run(make_key(), state, data, jnp.int32(t), jnp.int32(n))
        return jax.device_get(state), jax.device_get(log)

    @cached_property
    def first_state(self) -> State:
        """Returns the initial state."""
        return jax.device_get(self.rounds.init(make_key()))

    @cached_property
    def warm_state(self) -> State:
        """Returns the state after two rounds."""
        return self.run(WARM_UP)[0]

    @cached_property
    def last(self) -> tuple[State, Log]:
        """Returns state and log after six rounds."""
        return self.run(ROUNDS)

    @cached_property
    def client_round(self) -> Callable[..., Any]:
        """Returns a compiled function that sends to one client and trains it.

        It maps (state, data, i, t) to (payload, upload, client-side state).
        """

        def send_and_train(state: State, data: Any, i: jax.Array, t: jax.Array) -> Any:
            server_state = state._replace(clients=())
            send = ClientContext(i=i, data=None, t=t, key=stage_key(make_key(), SEND, t, i))
            train = ClientContext(
                i=i, data=client_data(data, i), t=t, key=stage_key(make_key(), TRAIN, t, i)
            )
            payload = self.algorithm.send(server_state, send)
            result = self.algorithm.train(payload, trees.row(state.clients, i), train)
            return payload, result.upload, result.client

        return jax.jit(send_and_train)

    @cached_property
    def personalize(self) -> Callable[..., Any]:
        """Returns a compiled function that maps (state, data, i) to a client's personal model."""

        def personalize(state: State, data: Any, i: jax.Array) -> Any:
            ctx = ClientContext(
                i=i,
                data=client_data(data, i),
                t=jnp.int32(WARM_UP),
                key=stage_key(make_key(), PERSONAL, WARM_UP, i),
            )
            server_state = state._replace(clients=())
            return self.algorithm.personalize(server_state, trees.row(state.clients, i), ctx)

        return jax.jit(personalize)

    def personal_models(self, data: Any) -> list[Any]:
        """Returns the personal models of all clients after two rounds, computed with `data`."""
        models = [self.personalize(self.warm_state, data, np.int32(i)) for i in ALL_CLIENTS]
        return jax.device_get(models)

    @cached_property
    def receive(self) -> Callable[..., Any]:
        """Returns the algorithm's `receive`, compiled."""
        return jax.jit(self.algorithm.receive)

    @cached_property
    def third_round(self) -> Any:
        """Returns (payloads, uploads, client-side states) of all clients, stacked, [N, ...].

        The data has nine more columns of padding per client than the data of `run`.
        """
        results = [
            self.client_round(self.warm_state, self.world.wide, np.int32(i), np.int32(WARM_UP))
            for i in ALL_CLIENTS
        ]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(results))

    def cohort(self, arrived: np.ndarray) -> Cohort:
        """Returns the third round's cohort with a slot for each client.

        `arrived` is bool [N]; uploads of the others are zeros.
        """
        payloads, uploads, _ = self.third_round
        ids: Any = np.where(arrived, ALL_CLIENTS, example.CLIENTS).astype(np.int32)
        weights: Any = np.where(arrived, self.world.federation.counts, 0).astype(np.float32)
        arrived_flags: Any = arrived
        return Cohort(
            ids=ids,
            arrived=arrived_flags,
            weights=weights,
            payloads=payloads,
            uploads=where(arrived, uploads, jax.tree.map(np.zeros_like, uploads)),
            t=np.int32(WARM_UP),
            key=stage_key(make_key(), RECEIVE, WARM_UP),
        )

    def looped(self, arrived: np.ndarray) -> State:
        """Returns the state after a third round computed client by client, without mapping.

        `arrived` is bool [N]; the others drop out.
        """
        server, rows = self.receive(self.warm_state._replace(clients=()), self.cohort(arrived))
        clients = where(arrived, self.third_round[2], self.warm_state.clients)
        return State(server, rows, clients)


def arrived_clients(log: Log, r: int = 0) -> np.ndarray:
    """Returns bool [N]: the clients whose uploads counted in the log's round at index `r`."""
    arrived = (log.present & ~log.dropped & ~log.rejected)[r]
    return np.isin(ALL_CLIENTS, log.ids[r][arrived])


def where(condition: np.ndarray, new: Any, old: Any) -> Any:
    """Returns rows of `new` where `condition` [K] is True, else of `old`; leaves are [K, ...]."""

    def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)


def shapes_are_right(subject: Subject) -> None:
    """Checks shapes and dtypes of everything that the algorithm's functions return."""
    check_shapes(subject.name, subject.algorithm, subject.world.federation, subject.world.data)


def equals_a_plain_loop(subject: Subject) -> None:
    """Compares a mapped round with a loop over clients with more padding, up to rounding."""
    state, log = subject.run(1, WARM_UP, subject.warm_state)
    chex.assert_trees_all_close(state, subject.looped(arrived_clients(log)), **TOLERANCES)


def padding_is_invisible(subject: Subject) -> None:
    """Checks that other values in the padding change no bit of the state and personal models."""
    world = subject.world
    refilled, _ = subject.run(1, data=world.refilled)
    chex.assert_trees_all_equal(subject.run(1)[0], refilled)
    models = subject.personal_models(world.data)
    chex.assert_trees_all_equal(models, subject.personal_models(world.refilled))


def training_reads_no_test_examples(subject: Subject) -> None:
    """Checks that other test examples change no bit of the state and personal models."""
    data = subject.world.data
    rows = np.asarray(data.test.rows)
    x = np.array(data.x)
    x[np.concatenate([rows[i, : example.TEST[i]] for i in ALL_CLIENTS])] += 3
    changed = data._replace(x=x)
    chex.assert_trees_all_equal(subject.run(1)[0], subject.run(1, data=changed)[0])
    models = subject.personal_models(data)
    chex.assert_trees_all_equal(models, subject.personal_models(changed))


def rounds_are_compiled_once(subject: Subject) -> None:
    """Checks that six rounds in one call equal calls of one, two and three, without retracing."""
    state_of_one_call, _ = subject.last
    traces, state = len(subject.traces), None
    for t, n in ((0, 1), (1, 2), (3, 3)):
        state, _ = subject.run(n, t, state)
    chex.assert_trees_all_equal(state_of_one_call, state)
    assert len(subject.traces) == traces > 0, "train was traced again in a later call"


def a_checkpoint_holds_the_whole_state(subject: Subject) -> None:
    """Checks that two rounds, a checkpoint and four more equal six rounds, bit for bit."""
    with TemporaryDirectory() as folder:
        store = checkpoints.open_store(Path(folder))
        store.save(WARM_UP, {"state": subject.rounds.place(subject.warm_state)}, {})
        template = jax.eval_shape(subject.rounds.init, make_key())
        restored = store.restore(WARM_UP, {"state": template})["state"]
    chex.assert_trees_all_equal(restored, subject.warm_state)
    again, _ = subject.run(ROUNDS - WARM_UP, WARM_UP, restored)
    chex.assert_trees_all_equal(subject.last[0], again)


def absent_clients_are_untouched(subject: Subject) -> None:
    """Checks that server-side rows and client-side state of absent clients keep every bit."""
    state, dropped = subject.first_state, 0
    for t in range(ROUNDS):
        before = state
        state, log = subject.run(1, t, before)
        arrived = arrived_clients(log)
        dropped += int(log.dropped.sum())
        first_part = 2 if subject.rows_of_absent_clients_change else 1
        parts = (jax.tree.leaves(each[first_part:]) for each in (before, state))
        for old, new in zip(*parts, strict=True):
            np.testing.assert_array_equal(old[~arrived], new[~arrived])
        if not arrived.any():
            chex.assert_trees_all_equal(before, state)
    assert dropped > 0


def empty_slots_may_hold_anything(subject: Subject) -> None:
    """Checks that payloads and uploads of absent clients change no bit of the server update."""
    arrived = np.array([False, True, True, False, True, True])
    clean = subject.cohort(arrived)

    def garbage(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.ones_like(leaf)
        return (50 * np.cos(np.arange(leaf.size))).astype(leaf.dtype).reshape(leaf.shape)

    def with_garbage(tree: Any) -> Any:
        return where(arrived, tree, jax.tree.map(garbage, tree))

    dirty = clean._replace(
        payloads=with_garbage(clean.payloads), uploads=with_garbage(clean.uploads)
    )
    state = subject.warm_state._replace(clients=())
    chex.assert_trees_all_equal(subject.receive(state, clean), subject.receive(state, dirty))


def a_round_without_uploads_changes_nothing(subject: Subject) -> None:
    """Checks that the state keeps every bit if no upload is finite."""
    data = subject.world.data
    state, log = subject.run(ROUNDS, data=data._replace(x=np.full_like(data.x, np.nan)))
    assert (log.rejected | log.dropped).all(), "an update of NaN examples was finite"
    chex.assert_trees_all_equal(subject.first_state, state)


def a_rejected_upload_is_an_absent_client(subject: Subject) -> None:
    """Checks that a client whose upload is NaN counts as one that dropped out."""
    data = subject.world.data
    _, clean = subject.run(1, WARM_UP, subject.warm_state)
    bad = int(np.flatnonzero(arrived_clients(clean))[-1])
    x = np.array(data.x)
    x[np.asarray(data.train.rows)[bad, : data.train.size[bad]]] = np.nan
    state, log = subject.run(1, WARM_UP, subject.warm_state, data._replace(x=x))
    np.testing.assert_array_equal(log.rejected[0], log.ids[0] == bad)
    others = arrived_clients(clean) & (bad != ALL_CLIENTS)
    chex.assert_trees_all_close(state, subject.looped(others), **TOLERANCES)


def every_byte_is_counted(subject: Subject) -> None:
    """Checks that bytes by layer and by client agree, and that absent clients upload none.

    A `traffic` of its own may leave parts out, but not all real numbers that are sent.
    """
    _, log = subject.last
    book = ledger.add(ledger.empty(example.CLIENTS), (log,), ROUNDS)
    zero = np.zeros(log.ids.shape, int)
    down, up = (sum(traffic.values(), zero) for traffic in (log.down, log.up))
    assert 0 < log.dropped.sum() < log.dropped.size
    assert not up[log.dropped].any(), "an upload of a client that dropped out was counted"
    assert (book.total_down, book.total_up) == (down.sum(), up.sum())
    assert (sum(book.client_down), sum(book.client_up)) == (book.total_down, book.total_up)
    payloads, uploads, _ = subject.third_round
    for direction, sent, counted in (("down", payloads, down), ("up", uploads, up)):
        has_numbers = any(
            jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(sent)
        )
        assert counted.sum() or not has_numbers, (
            f"numbers are sent {direction}, and 0 bytes counted"
        )
    without_first = ledger.add(ledger.empty(example.CLIENTS), (log,), ROUNDS, free_rounds=1)
    assert without_first.total_down == down[1:].sum()


RULES = (
    shapes_are_right,
    equals_a_plain_loop,
    padding_is_invisible,
    training_reads_no_test_examples,
    rounds_are_compiled_once,
    a_checkpoint_holds_the_whole_state,
    absent_clients_are_untouched,
    empty_slots_may_hold_anything,
    a_round_without_uploads_changes_nothing,
    a_rejected_upload_is_an_absent_client,
    every_byte_is_counted,
)
