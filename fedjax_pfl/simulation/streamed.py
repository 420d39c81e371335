"""A run whose clients and examples are not on the device: the cohort's are sent in each round.

Who is in a round does not depend on results, so that the next cohort is fetched while this one is
computed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_pfl.core import groups, trees
from fedjax_pfl.core.algorithm import Algorithm, PyTree, State
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.simulation.first_rows import First, first_state
from fedjax_pfl.simulation.offloaded_rows import OffloadedRows, apart, names
from fedjax_pfl.simulation.records import CohortBatch, Evaluation, Log, RoundFunctions, Slots
from fedjax_pfl.simulation.stores import Clients, Rows

_LEAST = 32  # clients that are evaluated by one call, or all if there are fewer


@dataclass(frozen=True)
class _Stored:
    """In the place of a leaf that is in a store: its group and number there."""

    g: int
    k: int


class Fetched(NamedTuple):
    """A group's part of a round, with records as they were when it was fetched."""

    slots: Slots  # NumPy
    data: FederatedData  # on the devices
    records: np.ndarray


def cohort_data(data: FederatedData, ids: np.ndarray, room: int, *, test: bool) -> FederatedData:
    """The examples of some clients as a federation of their own, in their order.

    Args:
      room: the examples that there is place for.
      test: whether those of the test come, too.
    """
    none = Split(np.zeros((len(data.train.size), 1), np.int32), np.zeros_like(data.train.size))
    splits = [data.train, data.validation, data.test if test else none]
    tables = [Split(np.asarray(s.rows)[ids], np.asarray(s.size)[ids]) for s in splits]
    real = [np.arange(rows.shape[1]) < size[:, None] for rows, size in tables]
    used = np.unique(np.concatenate([t.rows[r] for t, r in zip(tables, real, strict=True)]))

    def sent(whole: Any) -> np.ndarray:
        found = np.zeros((room, *whole.shape[1:]), whole.dtype)
        found[: len(used)] = whole[used]
        return found

    train, validation, tested = (
        Split(np.where(r, np.searchsorted(used, t.rows), 0).astype(np.int32), t.size)
        for t, r in zip(tables, real, strict=True)
    )
    label_map, classes = trees.row((data.label_map, data.classes), ids)
    return FederatedData(
        sent(data.x),
        sent(data.y),
        train,
        validation,
        tested,
        data.scale,
        data.shift,
        label_map,
        classes,
    )


def room_for(data: FederatedData, clients: int, *, test: bool) -> int:
    """The most examples that so many clients can have."""
    splits = (data.train, data.validation, data.test) if test else (data.train, data.validation)
    own = np.sum([np.asarray(split.size, np.int64) for split in splits], 0)
    most = int(np.sort(own)[-clients:].sum())
    return max(1, min(most, len(data.y)))


class StreamedProgram:
    """A phase's rounds, with clients and examples of all where this machine keeps them."""

    def __init__(
        self,
        plain: RoundFunctions,
        key: jax.Array,
        data: FederatedData,
        mesh: Mesh | None = None,
        *,
        end: int | None = None,
        store: str = "host",
        folder: Path | None = None,
    ) -> None:
        """What it is made from.

        Args:
          mesh: the devices that compute, if there are several.
          end: the round after the last, which nothing is fetched for.
          store, folder: where what stays with clients is kept.
        """
        self.plain, self.spec = plain, plain.spec
        everywhere = NamedSharding(mesh, PartitionSpec()) if mesh else None
        self.place: Callable[..., Any] = partial(jax.device_put, device=everywhere)
        self.key, self.data, self.end = self.place(key), jax.tree.map(np.asarray, data), end
        self.store, self.folder = store, folder
        jit = partial(jax.jit, out_shardings=everywhere)
        self.draw: Any = jit(plain.sample_slots)
        self.meet: Any = jit(self._meet, donate_argnums=1)
        self.score: list[Any] = [
            jit(partial(self._score, plain.score_cohort(g))) for g in range(len(self.spec.members))
        ]
        self.offloaded_rows: OffloadedRows | None = None  # as soon as there is a state
        self.worker = ThreadPoolExecutor(1)
        self.coming: tuple[int, Future[list[Fetched]]] | None = None
        self.stale = [np.zeros(0, np.int32) for _ in self.spec.members]  # since that was fetched
        self._room = functools.cache(lambda n, test: room_for(self.data, n, test=test))

    def init(self, start: State | None = None) -> State:
        """The first state, or one that begins where an earlier phase ended."""
        old: Any = None if start is None else start.clients
        if start is not None and not isinstance(old, Clients):
            old = Clients(self._stored([old]), several=False)
        arguments = (self.key,) if start is None else (self.key, old.filled(start, _Stored))
        leaves = jax.tree.leaves(arguments)
        # Leaf of the arguments: group and leaf in the store.
        own = {k: (leaf.g, leaf.k) for k, leaf in enumerate(leaves) if isinstance(leaf, _Stored)}

        def shape(leaf: Any) -> Any:
            if isinstance(leaf, _Stored):
                return old.shape(leaf.g, leaf.k)
            return jax.eval_shape(lambda x: x, leaf)

        def fetch(k: int) -> Any:
            return old.column(*own[k]) if k in own else leaves[k]

        shapes = jax.tree.map(shape, arguments)
        split = partial(apart, self.spec.original)
        forms = split(jax.eval_shape(self.plain.init, *shapes))[1]
        rest, firsts = first_state(self.plain.init, split, shapes, fetch)
        made = []
        for tree in forms:
            mine = [firsts.pop(0) for _ in jax.tree.leaves(tree)]
            made.append(self._begun(jax.tree.structure(tree), mine, old, own))
        return self._known(rest, self._clients(made))

    def _known(self, rest: State, clients: Clients) -> State:
        """A state, of which the programs know what it looks like from here on."""
        self.offloaded_rows = self.offloaded_rows or OffloadedRows(clients)
        return rest._replace(clients=clients)

    def _begun(
        self, tree: Any, firsts: Sequence[First], old: Clients | None, own: Mapping[int, Any]
    ) -> Rows:
        """A group's store at the start of a phase."""
        n = self.spec.federation.clients

        def of(first: First, ids: np.ndarray) -> np.ndarray:
            if first.same is not None:
                assert old is not None
                g, k = own[first.same]
                return old.groups[g].form.leaf(k, old.records(g, ids))
            if first.whole is not None:
                return first.whole[ids]
            assert first.row is not None
            return np.broadcast_to(first.row, (len(ids), *first.row.shape))

        def begins(first: First) -> np.ndarray:
            if first.same is None or old is None:
                return of(first, np.zeros(1, int))[0]
            g, k = own[first.same]
            return old.groups[g].form.leaf(k, old.groups[g].first)[0]

        rows = Rows(jax.tree.unflatten(tree, list(map(begins, firsts))), n, self.store, self.folder)
        written = np.zeros(0, np.int64)
        if any(first.whole is not None for first in firsts):
            written = np.arange(n)
        elif old is not None:
            of_groups = {own[first.same][0] for first in firsts if first.same is not None}
            written = np.unique(np.concatenate([written, *map(old.written, of_groups)]))
        for ids in rows.blocks(written):
            rows.put(
                ids, rows.form.pack(jax.tree.unflatten(tree, [of(one, ids) for one in firsts]))
            )
        return rows

    def enter(self, state: State) -> State:
        """A state as `run` takes it, from `init`, from an earlier program or from NumPy arrays."""
        rest, clients = state._replace(clients=()), state.clients
        if not isinstance(clients, Clients):
            rest, each = apart(self.spec.original, state)
            clients = self._clients(self._stored(each))
        return self._known(self.place(rest), clients)

    def _clients(self, made: Sequence[Rows]) -> Clients:
        given = self.spec.original
        return Clients(made, groups.has_groups(given), names(given))

    def _stored(self, each: Sequence[PyTree]) -> list[Rows]:
        """Arrays of all clients brought into a store."""
        made = []
        for tree in each:
            first = trees.row(tree, 0)
            rows = Rows(first, self.spec.federation.clients, self.store, self.folder)
            for ids in rows.blocks(np.arange(rows.clients)):
                rows.put(ids, rows.form.pack(trees.row(tree, ids)))
            made.append(rows)
        return made

    def compile(self, state: State, t: int) -> None:
        """So that no round waits for it."""
        shared, now = state._replace(clients=()), self._number(t)
        cohort_batches = self._parties(state.clients, self._next(state.clients, t))
        self.meet = self.meet.lower(self.key, shared, cohort_batches, now).compile()
        for g, ids in enumerate(self._evaluated()):
            if len(ids):
                fetched = self._block(state.clients, g, ids[: self._width(ids)])
                cohort_batch = self._parties(state.clients, [fetched], g)[0]
                self.score[g] = self.score[g].lower(self.key, shared, cohort_batch, now).compile()

    def run(self, state: State, t: int, n: int) -> tuple[State, tuple[Log, ...]]:
        """Rounds t .. t+n-1; the logs as NumPy arrays. The state that it is given is used up."""
        clients, shared, all_logs = state.clients, state._replace(clients=()), []
        known = self._pointed(clients)
        for r in range(t, t + n):
            cohort_batches = self._parties(clients, self._next(clients, r))
            self.coming = None
            if self.end is None or r + 1 < self.end:
                self.stale = [np.zeros(0, np.int32) for _ in self.stale]
                self.coming = r + 1, self._fetching(clients, r + 1)
            now, written, logs = self.meet(self.key, shared, cohort_batches, self._number(r))
            new, written, logs = jax.device_get((now.clients, written, logs))
            shared = now._replace(clients=())
            if self.coming is not None:
                self.coming[1].result()  # nothing is written while it is read
            for g, log in enumerate(logs):
                ids = log.ids[log.arrived]
                all_there = log.arrived.all()  # else a copy is made
                clients.write(g, ids, new[g] if all_there else trees.row(new[g], log.arrived))
                self.stale[g] = np.union1d(self.stale[g], ids)
            known.write(clients, written)
            all_logs.append(logs)
        return shared._replace(clients=clients), jax.tree.map(
            lambda *each: np.stack(each), *all_logs
        )

    def evaluate(self, state: State, t: int) -> Evaluation:
        """Like `CompiledRounds.evaluate`, in NumPy, block by block with prefetching."""
        self._pointed(state.clients)
        shared, n = state._replace(clients=()), self.spec.federation.clients
        whole: Any = None
        for g, everyone in enumerate(self._evaluated()):
            size = self._width(everyone)
            blocks = [everyone[start : start + size] for start in range(0, len(everyone), size)]
            fetch = partial(self._block, state.clients, g)
            coming = [self.worker.submit(fetch, ids) for ids in blocks[:1]]
            for number, ids in enumerate(blocks):
                fetched = coming.pop().result()
                following = blocks[number + 1 : number + 2]
                coming += [self.worker.submit(fetch, ids) for ids in following]
                cohort_batch = self._parties(state.clients, [fetched], g)[0]
                scores = jax.device_get(
                    self.score[g](self.key, shared, cohort_batch, self._number(t))
                )
                if whole is None:
                    whole = jax.tree.map(lambda a: np.zeros((n, *a.shape[1:]), a.dtype), scores)
                for into, some in zip(*map(jax.tree.leaves, (whole, scores)), strict=True):
                    into[ids] = some[: len(ids)]
        return whole

    def observe(self, algorithm: Algorithm, state: State) -> dict[str, np.ndarray]:
        """What an algorithm shows; of clients that which it reads, of all of them."""
        known, clients = self._pointed(state.clients), state.clients
        own = Clients(clients.groups[: len(self.spec.members)], clients.several)
        given, tree = jax.tree.flatten(own.filled(state, own.shape))
        shown_names: list[str] = []

        def flat(*leaves: Any) -> list[Any]:
            whole = jax.tree.unflatten(tree, leaves)
            shown = algorithm.observe(whole._replace(rows=known.seen(whole.rows)))
            shown_names[:] = shown
            return [shown[name] for name in shown_names]

        closed = jax.make_jaxpr(flat)(*given)
        used, needed = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(shown_names))
        shared = jax.tree.leaves(jax.device_get(state._replace(clients=())))
        columns = [
            partial(clients.column, g, k)
            for g, rows in enumerate(own.groups)
            for k in range(len(rows.form.shapes))
        ]
        rows = zip(columns, needed[len(shared) :], strict=True)
        inputs = [leaf for leaf, need in zip(shared, needed, strict=False) if need]
        inputs += [column() for column, need in rows if need]
        shown = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(used, closed.consts)))(*inputs)
        return dict(zip(shown_names, jax.device_get(shown), strict=True))

    def _meet(self, key: Any, shared: State, cohort_batches: Any, t: Any) -> Any:
        """Like `RoundFunctions.meet`; also returns the pending writes of offloaded rows."""
        assert self.offloaded_rows is not None
        rows = self.offloaded_rows.seen(shared.rows, len(cohort_batches[0].slots.ids))
        now, logs = self.plain.run_cohort(key, shared._replace(rows=rows), cohort_batches, t)
        rest, written = self.offloaded_rows.taken(now.rows)
        return now._replace(rows=rest), written, logs

    def _score(
        self, score: Any, key: Any, shared: State, cohort_batch: CohortBatch, t: Any
    ) -> Evaluation:
        assert self.offloaded_rows is not None
        rows = self.offloaded_rows.seen(shared.rows)
        return score(key, shared._replace(rows=rows), cohort_batch, t)

    def _pointed(self, clients: Clients) -> OffloadedRows:
        """The rows off the devices that programs read: these clients'."""
        assert self.offloaded_rows is not None
        self.offloaded_rows.point(clients)
        return self.offloaded_rows

    def _number(self, value: int) -> Any:
        return self.place(np.int32(value))

    def _evaluated(self) -> list[np.ndarray]:
        """The ids of those of each group who are evaluated."""
        some = np.arange(self.spec.federation.clients, dtype=np.int32)
        some = (
            some
            if self.spec.evaluated_ids is None
            else np.asarray(self.spec.evaluated_ids, np.int32)
        )
        return [some[own[some]] for own in self.spec.membership]

    def _width(self, ids: np.ndarray) -> int:
        return max(1, min(len(ids), max(_LEAST, self.spec.cohort)))

    def _next(self, clients: Clients, t: int) -> list[Fetched]:
        """A round's cohort, which may have been fetched."""
        if self.coming is None or self.coming[0] != t:
            self.stale = [np.zeros(0, np.int32) for _ in self.stale]
            self.coming = t, self._fetching(clients, t)
        return self.coming[1].result()

    def _fetching(self, clients: Clients, t: int) -> "Future[list[Fetched]]":
        # Asked for before the round that is computed meanwhile, so that it does not wait for that.
        return self.worker.submit(self._fetch, clients, self.draw(self.key, self._number(t)))

    def _fetch(self, clients: Clients, each: Sequence[Slots]) -> list[Fetched]:
        return [
            self._fetched(clients, g, Slots(*map(np.asarray, slots)), test=False)
            for g, slots in enumerate(each)
        ]

    def _block(self, clients: Clients, g: int, ids: np.ndarray) -> Fetched:
        """Clients who are evaluated; a block has the same length always."""
        more = self._width(self._evaluated()[g]) - len(ids)
        slots = Slots(np.pad(ids, (0, more), mode="edge"), np.arange(len(ids) + more) < len(ids))
        return self._fetched(clients, g, slots, test=True)

    def _fetched(self, clients: Clients, g: int, slots: Slots, *, test: bool) -> Fetched:
        ids = np.asarray(slots.ids)
        room = self._room(len(ids), test)
        data = cohort_data(self.data, ids, room, test=test)
        return Fetched(slots, self.place(data), clients.records(g, ids))

    def _parties(
        self, clients: Clients, each: Sequence[Fetched], first: int = 0
    ) -> tuple[CohortBatch, ...]:
        """On the devices, with rows as they are now."""
        cohort_batches = []
        for g, (slots, data, records) in enumerate(each, first):
            old = np.isin(slots.ids, self.stale[g])
            records[old] = clients.records(g, np.asarray(slots.ids)[old])
            places = np.arange(len(records), dtype=np.int32)
            rows = clients.groups[g].form.unpack(records)
            ours = self.place((Slots(*slots), places, rows))
            cohort_batches.append(CohortBatch(ours[0], ours[1], data, ours[2]))
        return tuple(cohort_batches)
