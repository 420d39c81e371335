"""The rules that every method keeps, each a function of a `Subject`: run them on any algorithm.

A subject's rules share four programs: `init`, `run`, one client's visit and `receive`. What differs
between them (data, keys, the round, how many rounds) is traced; what is done beside them is done in
NumPy, because outside of a program JAX compiles one for each operation and shape.
"""

from collections.abc import Callable, Mapping
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
from fedjax_pfl.core.randomness import SEND, TRAIN, stage_key
from fedjax_pfl.core.shape_check import check_shapes
from fedjax_pfl.runs import checkpoints
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.records import CompiledRounds, Log
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny

KEY = jax.random.key(7)
ROUNDS = 6
BEGUN = 2  # rounds before the one that is looked at, so that no two clients are alike any more
# Five of six clients in chunks of three, of which one place stays empty, and some drop out.
HOW = {"cohort": 5, "calls": ROUNDS, "chunk": 3, "dropout": 0.3}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class World(NamedTuple):
    """A federation of the tiny size."""

    data: FederatedData
    federation: Federation
    wide: FederatedData  # with nine more rows of padding for every client
    refilled: FederatedData  # with other values in the padding


def world(federated: Callable[..., tuple[FederatedData, Federation]]) -> World:
    """What `federated` makes, as `tiny.federated` does."""
    return World(*federated(), federated(extra=9)[0], federated(filler=11)[0])


TINY = world(tiny.federated)
DATA, FEDERATION, *_ = TINY


@dataclass(eq=False)
class Subject:
    """A method on a tiny federation, and what its rules share."""

    name: str
    case: cases.Case
    make: Callable[..., Algorithm]  # (federation, its own settings={}) -> Algorithm
    world: World = TINY

    @cached_property
    def algorithm(self) -> Algorithm:
        return self.make(self.world.federation)

    @cached_property
    def traces(self) -> list[int]:
        """One for each time that `train` was traced in `rounds`."""
        return []

    @cached_property
    def rounds(self) -> CompiledRounds:
        def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
            self.traces.append(1)
            return self.algorithm.train(payload, client, ctx)

        counted = self.algorithm._replace(train=train)
        return make_rounds(counted, self.world.federation, **HOW)

    def run(self, n: int, t: int = 0, state: Any = None, data: Any = None) -> tuple[State, Log]:
        """State and log, as NumPy, after n more rounds."""
        state = self.rounds.init(KEY) if state is None else self.rounds.place(state)
        data = self.world.data if data is None else data
        state, (log,) = self.rounds.run(KEY, state, data, jnp.int32(t), jnp.int32(n))
        return jax.device_get(state), jax.device_get(log)

    @cached_property
    def first(self) -> State:
        return jax.device_get(self.rounds.init(KEY))

    @cached_property
    def begun(self) -> State:
        """After two rounds."""
        return self.run(BEGUN)[0]

    @cached_property
    def last(self) -> tuple[State, Log]:
        return self.run(ROUNDS)

    @cached_property
    def ctx(self) -> Callable[..., Any]:
        """`send` and `train` for one client, compiled once for all of them."""

        def work(state: State, data: Any, i: jax.Array, t: jax.Array) -> Any:
            seen = state._replace(clients=())
            send = ClientContext(i, None, t, stage_key(KEY, SEND, t, i))
            train = ClientContext(i, client_data(data, i), t, stage_key(KEY, TRAIN, t, i))
            payload = self.algorithm.send(seen, send)
            done = self.algorithm.train(payload, trees.row(state.clients, i), train)
            return payload, done.upload, done.client

        return jax.jit(work)

    @cached_property
    def receive(self) -> Callable[..., Any]:
        return jax.jit(self.algorithm.receive)

    @cached_property
    def met(self) -> Any:
        """Payloads, uploads and clients of a third round of all, one after the other.

        Of data with nine more rows of padding for every client than `run` has.
        """
        one = [
            self.ctx(self.begun, self.world.wide, np.int32(i), np.int32(BEGUN)) for i in EVERYBODY
        ]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(one))

    def cohort(self, here: np.ndarray) -> Cohort:
        """A seat for each client, of which some are empty; as the simulation makes it."""
        payloads, uploads, _ = self.met
        ids = np.where(here, EVERYBODY, tiny.CLIENTS).astype(np.int32)
        weights = np.where(here, tiny.TRAIN, 0).astype(np.float32)
        present = where(here, uploads, jax.tree.map(np.zeros_like, uploads))
        return Cohort(ids, here, weights, payloads, present, np.int32(BEGUN))

    def looped(self, here: np.ndarray) -> State:
        """The third round as a plain loop over those that arrived."""
        server, rows = self.receive(self.begun._replace(clients=()), self.cohort(here))
        return State(server, rows, where(here, self.met[2], self.begun.clients))


EVERYBODY = np.arange(tiny.CLIENTS)


def arrived(log: Log, r: int = 0) -> np.ndarray:
    """bool [N]: whose upload counted in a round of the log."""
    here = (log.present & ~log.dropped & ~log.rejected)[r]
    return np.isin(EVERYBODY, log.ids[r][here])


def where(condition: np.ndarray, new: Any, old: Any) -> Any:
    """As `trees.where`, in NumPy: `condition` is [K], the leaves are [K, ...]."""

    def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)


def subject(name: str) -> Subject:
    def make(federation: Federation, own: Mapping[str, Any] = cases.NOTHING) -> Algorithm:
        return cases.make(name, federation, own)

    return Subject(name, cases.CASES[name], make)


def shapes_are_right(one: Subject) -> None:
    check_shapes(one.name, one.algorithm, one.world.federation, one.world.data)


def the_interesting_branch_fires(one: Subject) -> None:
    assert one.case.fired(one.first, one.last[0])


def equals_a_plain_loop(one: Subject) -> None:
    """In which each client has more padding, and the cohort one more seat, which is empty."""
    got, log = one.run(1, BEGUN, one.begun)
    chex.assert_trees_all_close(got, one.looped(arrived(log)), **CLOSE)


def values_of_padding_are_not_read(one: Subject) -> None:
    refilled, _ = one.run(1, data=one.world.refilled)
    chex.assert_trees_all_equal(one.run(1)[0], refilled)


def test_examples_are_not_seen(one: Subject) -> None:
    table = np.asarray(DATA.test.rows)
    others = np.array(DATA.x)
    others[np.concatenate([table[i, : tiny.TEST[i]] for i in EVERYBODY])] += 3
    again, _ = one.run(1, data=DATA._replace(x=others))
    chex.assert_trees_all_equal(one.run(1)[0], again)


test_examples_are_not_seen.__test__ = False  # type: ignore[attr-defined]


def calls_do_not_matter_and_compile_once(one: Subject) -> None:
    """All rounds in one call, and in three calls of other lengths, bit for bit."""
    whole, _ = one.last
    before, state = len(one.traces), None
    for t, n in ((0, 1), (1, 2), (3, 3)):
        state, _ = one.run(n, t, state)
    chex.assert_trees_all_equal(whole, state)
    assert len(one.traces) == before > 0


def a_checkpoint_holds_all_of_the_state(one: Subject) -> None:
    """Two rounds, saved and restored, and four more equal six rounds, bit for bit."""
    with TemporaryDirectory() as folder:
        store = checkpoints.open_store(Path(folder))
        store.save(BEGUN, {"state": one.rounds.place(one.begun)}, {})
        template = jax.eval_shape(one.rounds.init, KEY)
        restored = store.restore(BEGUN, {"state": template})["state"]
    chex.assert_trees_all_equal(restored, one.begun)
    again, _ = one.run(ROUNDS - BEGUN, BEGUN, restored)
    chex.assert_trees_all_equal(one.last[0], again)


def absent_clients_are_untouched(one: Subject) -> None:
    state, gone = one.first, 0
    for t in range(ROUNDS):
        before = state
        state, log = one.run(1, t, before)
        here = arrived(log)
        gone += int(log.dropped.sum())
        first = 2 if one.case.rows_of_absent_move else 1
        parts = (jax.tree.leaves(whole[first:]) for whole in (before, state))
        for old, new in zip(*parts, strict=True):
            np.testing.assert_array_equal(old[~here], new[~here])
        if not here.any():
            chex.assert_trees_all_equal(before, state)
    assert gone > 0


def empty_seats_may_hold_anything(one: Subject) -> None:
    """What lies where a client did not arrive is not specified: the first seat is such a one."""
    here = np.array([False, True, True, False, True, True])
    clean = one.cohort(here)

    def rubbish(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.ones_like(leaf)
        return (50 * np.cos(np.arange(leaf.size))).astype(leaf.dtype).reshape(leaf.shape)

    def filled(tree: Any) -> Any:
        return where(here, tree, jax.tree.map(rubbish, tree))

    dirty = clean._replace(payloads=filled(clean.payloads), uploads=filled(clean.uploads))
    seen = one.begun._replace(clients=())
    chex.assert_trees_all_equal(one.receive(seen, clean), one.receive(seen, dirty))


def nobody_answers(one: Subject) -> None:
    """All uploads are bad: the state stays as it was, bit for bit."""
    state, log = one.run(ROUNDS, data=DATA._replace(x=np.full_like(DATA.x, np.nan)))
    assert (log.rejected | log.dropped).all()
    chex.assert_trees_all_equal(one.first, state)


def a_bad_upload_changes_nothing_for_the_others(one: Subject) -> None:
    """One client computes NaN: the round ends as if it had not answered."""
    _, clean = one.run(1, BEGUN, one.begun)
    bad = int(np.flatnonzero(arrived(clean))[-1])
    poisoned = np.array(DATA.x)
    poisoned[np.asarray(DATA.train.rows)[bad, : tiny.TRAIN[bad]]] = np.nan
    got, log = one.run(1, BEGUN, one.begun, DATA._replace(x=poisoned))
    np.testing.assert_array_equal(log.rejected[0], log.ids[0] == bad)
    others = arrived(clean) & (bad != EVERYBODY)
    chex.assert_trees_all_close(got, one.looped(others), **CLOSE)


def every_byte_is_counted(one: Subject) -> None:
    _, log = one.last
    book = ledger.add(ledger.empty(tiny.CLIENTS), (log,), ROUNDS)
    zero = np.zeros(log.ids.shape, int)
    down, up = (sum(bill.values(), zero) for bill in (log.down, log.up))
    may = one.case.bytes_per_visit(cases.model_bytes())
    may_down, may_up = (allowed if isinstance(allowed, set) else {allowed} for allowed in may)
    dropped = log.dropped
    assert 0 < dropped.sum() < dropped.size
    assert set(down.ravel().tolist()) <= may_down
    assert set(up[~dropped].tolist()) <= may_up
    assert not up[dropped].any()
    assert (book.total_down, book.total_up) == (down.sum(), up.sum())
    assert (sum(book.client_down), sum(book.client_up)) == (book.total_down, book.total_up)
    free = ledger.add(ledger.empty(tiny.CLIENTS), (log,), ROUNDS, free_rounds=1)
    assert free.total_down == down[1:].sum()


RULES = (
    shapes_are_right,
    the_interesting_branch_fires,
    equals_a_plain_loop,
    values_of_padding_are_not_read,
    test_examples_are_not_seen,
    calls_do_not_matter_and_compile_once,
    a_checkpoint_holds_all_of_the_state,
    absent_clients_are_untouched,
    empty_seats_may_hold_anything,
    nobody_answers,
    a_bad_upload_changes_nothing_for_the_others,
    every_byte_is_counted,
)
