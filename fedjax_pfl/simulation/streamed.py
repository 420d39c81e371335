"""Programs whose clients and examples are off the device: each round fetches those of its cohort.

Cohorts do not depend on results, so the next cohort is fetched while a round is computed.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_pfl.core import groups, jaxprs, trees
from fedjax_pfl.core.algorithm import Algorithm, PyTree, State
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.simulation.cohort_examples import cohort_data, max_examples
from fedjax_pfl.simulation.first_rows import InitialLeaf, initial_state
from fedjax_pfl.simulation.offloaded_rows import OffloadedRows, part_names, split_state
from fedjax_pfl.simulation.records import CohortBatch, Evaluation, Log, RoundFunctions, Slots
from fedjax_pfl.simulation.stores import ClientStore, RowStore

_MIN_BLOCK = 32  # clients that one call evaluates, or all if there are fewer


@dataclass(frozen=True)
class _StoredLeaf:
    """Placeholder of leaf `k` [N, ...] of group `g` of a `ClientStore`."""

    g: int
    k: int


class FetchedCohort(NamedTuple):
    """K clients of a group to train or evaluate, with their records at the time of fetching."""

    slots: Slots  # NumPy arrays
    data: FederatedData  # of these clients, on the devices
    records: np.ndarray  # client-side state, uint8 [K, bytes]; see `record_layout.RecordLayout`


class StreamedProgram:
    """Rounds of a phase whose clients and examples are on the host or on disk.

    Has the same methods as `DeviceProgram`.

    Args:
      functions: Rounds of the method.
      key: Random key of the run.
      data: Examples of all clients.
      mesh: The devices. Default: one device.
      end: Index after the last round; no cohort is fetched from there on. Default: no end.
      store: "host" or "disk".
      folder: Folder of the files for "disk".
    """

    def __init__(
        self,
        functions: RoundFunctions,
        key: jax.Array,
        data: FederatedData,
        mesh: Mesh | None = None,
        *,
        end: int | None = None,
        store: str = "host",
        folder: Path | None = None,
    ) -> None:
        self.functions, self.spec = functions, functions.spec
        everywhere = NamedSharding(mesh, PartitionSpec()) if mesh else None
        self.place: Callable[..., Any] = partial(jax.device_put, device=everywhere)
        self.key, self.data, self.end = self.place(key), jax.tree.map(np.asarray, data), end
        self.store, self.folder = store, folder
        jit = partial(jax.jit, out_shardings=everywhere)
        self.sample: Any = jit(functions.sample_slots)
        self.train: Any = jit(self._train, donate_argnums=1)
        self.score: list[Any] = [
            jit(partial(self._score, functions.score_cohort(g)))
            for g in range(len(self.spec.members))
        ]
        self._observe: dict[Any, tuple[list[str], Callable[..., list[Any]]]] = {}
        self.offloaded_rows: OffloadedRows | None = None  # set by the first state
        self.worker = ThreadPoolExecutor(1)
        # The rows and round of a cohort, and the cohort.
        self.prefetched: tuple[Any, int, Future[list[FetchedCohort]]] | None = None
        self.stale = self._no_ids()  # of each group, clients that changed since the fetch
        self.writes = 0  # of the store, at the fetch or after this program's last write
        self._capacity = functools.cache(lambda n, test: max_examples(self.data, n, test=test))

    def _no_ids(self) -> list[np.ndarray]:
        return [np.zeros(0, np.int32) for _ in self.spec.members]

    def init(self, start: State | None = None) -> State:
        """Returns the initial state; `start` is the last state of the previous phase, if any."""
        old: Any = None if start is None else start.clients
        if start is not None and not isinstance(old, ClientStore):
            old = ClientStore(self._stores([old]), has_groups=False)
        arguments = (self.key,) if start is None else (self.key, old.fill(start, _StoredLeaf))
        leaves = jax.tree.leaves(arguments)
        stored = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, _StoredLeaf)}

        def shape(leaf: Any) -> Any:
            """Returns the shape and dtype of an argument."""
            if isinstance(leaf, _StoredLeaf):
                return old.shape(leaf.g, leaf.k)
            return jax.eval_shape(lambda x: x, leaf)

        def fetch(k: int) -> Any:
            return old.column(stored[k].g, stored[k].k) if k in stored else leaves[k]

        shapes = jax.tree.map(shape, arguments)
        split = partial(split_state, self.spec.original)
        client_shapes = split(jax.eval_shape(self.functions.init, *shapes))[1]
        rest, initial = initial_state(self.functions.init, split, shapes, fetch, stored)
        stores = []
        for tree in client_shapes:
            leaves_of_tree = [initial.pop(0) for _ in jax.tree.leaves(tree)]
            structure = jax.tree.structure(tree)
            stores.append(self._initial_store(structure, leaves_of_tree, old, stored))
        return self._join(rest, self._client_store(stores))

    def _join(self, rest: State, clients: ClientStore) -> State:
        """Returns the state `rest` with `clients`. The first call lays out offloaded rows."""
        self.offloaded_rows = self.offloaded_rows or OffloadedRows(clients)
        return rest._replace(clients=clients)

    def _initial_store(
        self,
        structure: Any,
        leaves: Sequence[InitialLeaf],
        old: ClientStore | None,
        stored: Mapping[int, _StoredLeaf],
    ) -> RowStore:
        """Returns the store of a group, or of an offloaded part, at the start of a phase.

        Args:
          structure: Tree structure of a client's arrays.
          leaves: Initial value of each leaf.
          old: Clients at the end of the previous phase; None in the first phase.
          stored: Leaves of `old` by their index among the leaves of `init`'s arguments.
        """
        n = self.spec.federation.clients

        def rows_of(leaf: InitialLeaf, ids: np.ndarray) -> np.ndarray:
            """Returns the initial rows of these clients, [len(ids), ...]."""
            if leaf.argument is not None:
                assert old is not None
                source = stored[leaf.argument]
                return old.groups[source.g].layout.leaf(source.k, old.records(source.g, ids))
            if leaf.all_rows is not None:
                return leaf.all_rows[ids]
            assert leaf.row is not None
            return np.broadcast_to(leaf.row, (len(ids), *leaf.row.shape))

        def first_row(leaf: InitialLeaf) -> np.ndarray:
            """Returns the row of clients whose record is not written."""
            if leaf.argument is None or old is None:
                return rows_of(leaf, np.zeros(1, int))[0]
            source = stored[leaf.argument]
            return old.groups[source.g].layout.leaf(source.k, old.groups[source.g].first)[0]

        first = jax.tree.unflatten(structure, list(map(first_row, leaves)))
        rows = RowStore(first=first, clients=n, store=self.store, folder=self.folder)
        written = np.zeros(0, np.int64)
        if any(leaf.all_rows is not None for leaf in leaves):
            written = np.arange(n)
        elif old is not None:
            sources = {stored[leaf.argument].g for leaf in leaves if leaf.argument is not None}
            written = np.unique(np.concatenate([written, *map(old.written, sources)]))
        for ids in rows.blocks(written):
            arrays = jax.tree.unflatten(structure, [rows_of(leaf, ids) for leaf in leaves])
            rows.put(ids, rows.layout.pack(arrays))
        return rows

    def enter(self, state: State) -> State:
        """Puts a state, also one of NumPy arrays or of another program, into the form for `run`."""
        rest, clients = state._replace(clients=()), state.clients
        if not isinstance(clients, ClientStore):
            rest, client_trees = split_state(self.spec.original, state)
            clients = self._client_store(self._stores(client_trees))
        return self._join(self.place(rest), clients)

    def _client_store(self, stores: Sequence[RowStore]) -> ClientStore:
        method = self.spec.original
        return ClientStore(stores, groups.has_groups(method), part_names(method))

    def _stores(self, client_trees: Sequence[PyTree]) -> list[RowStore]:
        """Copies trees with leaves [N, ...], of groups or offloaded parts, into one store each."""
        stores, n = [], self.spec.federation.clients
        for tree in client_trees:
            first = trees.row(tree, 0)
            rows = RowStore(first=first, clients=n, store=self.store, folder=self.folder)
            for ids in rows.blocks(np.arange(n)):
                rows.put(ids, rows.layout.pack(trees.row(tree, ids)))
            stores.append(rows)
        return stores

    def compile(self, state: State, t: int) -> None:
        """Compiles training and evaluation for states like `state`, by the cohort of round `t`."""
        shared, number = state._replace(clients=()), self._number(t)
        cohort_batches = self._batches(state.clients, self._next_cohort(state.clients, t))
        self.train = self.train.lower(self.key, shared, cohort_batches, number).compile()
        for g, ids in enumerate(self._evaluated_ids()):
            if len(ids):
                fetched = self._fetch_block(state.clients, g, ids[: self._block_length(ids)])
                batch = self._batches(state.clients, [fetched], g)[0]
                self.score[g] = self.score[g].lower(self.key, shared, batch, number).compile()

    def run(self, state: State, t: int, n: int) -> tuple[State, tuple[Log, ...]]:
        """Runs rounds t to t + n - 1. Returns the state, and a log in NumPy for each group.

        The arrays of the logs are [n, K]. The state that is passed in is used up.
        """
        clients, shared, all_logs = state.clients, state._replace(clients=()), []
        offloaded = self._read_from(clients)
        for r in range(t, t + n):
            cohort_batches = self._batches(clients, self._next_cohort(clients, r))
            self.prefetched = None
            if self.end is None or r + 1 < self.end:
                self._prefetch(clients, r + 1)
            trained, pending, logs = self.train(self.key, shared, cohort_batches, self._number(r))
            new_clients, pending, logs = jax.device_get((trained.clients, pending, logs))
            shared = trained._replace(clients=())
            if self.prefetched is not None:
                self.prefetched[2].result()  # the store is not written while it is read
            clients = clients.hand_over()
            for g, log in enumerate(logs):
                ids = log.ids[log.arrived]
                all_arrived = log.arrived.all()  # saves a copy
                rows = new_clients[g] if all_arrived else trees.row(new_clients[g], log.arrived)
                clients.write(g, ids, rows)
                self.stale[g] = np.union1d(self.stale[g], ids)
            offloaded.write(clients, pending)
            self.writes = clients.writes
            all_logs.append(logs)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *all_logs)
        return shared._replace(clients=clients), stacked

    def evaluate(self, state: State, t: int) -> Evaluation:
        """Scores all clients after `t` rounds, in NumPy and in blocks with prefetching."""
        self._read_from(state.clients)
        shared, n = state._replace(clients=()), self.spec.federation.clients
        evaluation: Any = None
        for g, group_ids in enumerate(self._evaluated_ids()):
            size = self._block_length(group_ids)
            blocks = [group_ids[start : start + size] for start in range(0, len(group_ids), size)]
            fetch = partial(self._fetch_block, state.clients, g)
            prefetched = [self.worker.submit(fetch, ids) for ids in blocks[:1]]
            for number, ids in enumerate(blocks):
                fetched = prefetched.pop().result()
                prefetched += [
                    self.worker.submit(fetch, next_ids)
                    for next_ids in blocks[number + 1 : number + 2]
                ]
                batch = self._batches(state.clients, [fetched], g)[0]
                scores = jax.device_get(self.score[g](self.key, shared, batch, self._number(t)))
                if evaluation is None:
                    evaluation = jax.tree.map(
                        lambda a: np.zeros((n, *a.shape[1:]), a.dtype), scores
                    )
                for target, values in zip(*map(jax.tree.leaves, (evaluation, scores)), strict=True):
                    target[ids] = values[: len(ids)]
        return evaluation

    def observe(self, algorithm: Algorithm, state: State) -> dict[str, np.ndarray]:
        """Returns the diagnostics of the method's `observe`, arrays by name.

        Only leaves of all clients that these arrays depend on are read. Compiled once per method.
        """
        offloaded, clients = self._read_from(state.clients), state.clients
        group_store = ClientStore(clients.groups[: len(self.spec.members)], clients.has_groups)
        if algorithm.observe not in self._observe:
            self._observe[algorithm.observe] = _observe(algorithm, state, group_store, offloaded)
        names, compute = self._observe[algorithm.observe]
        shared = jax.tree.leaves(jax.device_get(state._replace(clients=())))
        columns = [
            partial(clients.column, g, k)
            for g, rows in enumerate(group_store.groups)
            for k in range(len(rows.layout.shapes))
        ]

        def fetch(k: int) -> Any:
            return shared[k] if k < len(shared) else columns[k - len(shared)]()

        return dict(zip(names, jax.device_get(compute(fetch)), strict=True))

    def _train(self, key: Any, shared: State, cohort_batches: Any, t: Any) -> Any:
        """Like `RoundFunctions.run_cohort`, with offloaded rows.

        Returns the state, the pending writes of offloaded rows by name, and the logs.
        """
        assert self.offloaded_rows is not None
        rows = self.offloaded_rows.join(shared.rows, len(cohort_batches[0].slots.ids))
        state, logs = self.functions.run_cohort(key, shared._replace(rows=rows), cohort_batches, t)
        on_device, pending = self.offloaded_rows.split(state.rows)
        return state._replace(rows=on_device), pending, logs

    def _score(self, score: Any, key: Any, shared: State, batch: CohortBatch, t: Any) -> Evaluation:
        """Calls `score`, a result of `RoundFunctions.score_cohort`, with offloaded rows."""
        assert self.offloaded_rows is not None
        rows = self.offloaded_rows.join(shared.rows)
        return score(key, shared._replace(rows=rows), batch, t)

    def _read_from(self, clients: ClientStore) -> OffloadedRows:
        """Makes the compiled programs read offloaded rows from `clients`; returns these rows."""
        assert self.offloaded_rows is not None
        self.offloaded_rows.set_clients(clients)
        return self.offloaded_rows

    def _number(self, value: int) -> Any:
        return self.place(np.int32(value))

    def _evaluated_ids(self) -> list[np.ndarray]:
        """Returns the ids of the evaluated clients of each group."""
        ids = self.spec.evaluated_ids
        if ids is None:
            ids = np.arange(self.spec.federation.clients)
        ids = np.asarray(ids, np.int32)
        return [ids[is_member[ids]] for is_member in self.spec.membership]

    def _block_length(self, ids: np.ndarray) -> int:
        return max(1, min(len(ids), max(_MIN_BLOCK, self.spec.cohort)))

    def _next_cohort(self, clients: ClientStore, t: int) -> list[FetchedCohort]:
        """Returns the cohort of round `t`, one entry per group; fetches it if necessary."""
        fetched = self.prefetched and (*self.prefetched[:2], self.writes)
        if fetched != (clients.groups, t, clients.writes):  # another program may have written
            self._prefetch(clients, t)
        assert self.prefetched is not None
        return self.prefetched[2].result()

    def _prefetch(self, clients: ClientStore, t: int) -> None:
        """Starts to fetch the cohort of round `t` in the worker thread."""
        # Sample now: in the worker this would wait for the round that is submitted next.
        slots = self.sample(self.key, self._number(t))
        self.stale, self.writes = self._no_ids(), clients.writes
        self.prefetched = clients.groups, t, self.worker.submit(self._fetch_cohort, clients, slots)

    def _fetch_cohort(self, clients: ClientStore, slots: Sequence[Slots]) -> list[FetchedCohort]:
        """Fetches the sampled clients of each group, given the slots of each group."""
        return [
            self._fetch(clients, g, Slots(*map(np.asarray, group_slots)), test=False)
            for g, group_slots in enumerate(slots)
        ]

    def _fetch_block(self, clients: ClientStore, g: int, ids: np.ndarray) -> FetchedCohort:
        """Fetches the clients `ids` of group `g` to evaluate.

        Empty slots pad them to the length of a block.
        """
        padding = self._block_length(self._evaluated_ids()[g]) - len(ids)
        padded = np.pad(ids, (0, padding), mode="edge")
        return self._fetch(clients, g, Slots(padded, np.arange(len(padded)) < len(ids)), test=True)

    def _fetch(self, clients: ClientStore, g: int, slots: Slots, *, test: bool) -> FetchedCohort:
        """Fetches the clients of group `g` in these slots, with test examples if `test`."""
        ids = np.asarray(slots.ids)
        data = cohort_data(self.data, ids, self._capacity(len(ids), test), test=test)
        return FetchedCohort(slots, self.place(data), clients.records(g, ids))

    def _batches(
        self, clients: ClientStore, cohorts: Sequence[FetchedCohort], first_group: int = 0
    ) -> tuple[CohortBatch, ...]:
        """Puts fetched clients on the devices, with new records of those that changed since.

        The `cohorts` are of the groups `first_group`, `first_group` + 1 and so on.
        """
        batches = []
        for g, (slots, data, records) in enumerate(cohorts, first_group):
            is_stale = np.isin(slots.ids, self.stale[g])
            records[is_stale] = clients.records(g, np.asarray(slots.ids)[is_stale])
            places = np.arange(len(records), dtype=np.int32)
            rows = clients.groups[g].layout.unpack(records)
            slots, places, rows = self.place((Slots(*slots), places, rows))
            batches.append(CohortBatch(slots=slots, places=places, data=data, clients=rows))
        return tuple(batches)


def _observe(
    algorithm: Algorithm, state: State, clients: ClientStore, offloaded: OffloadedRows
) -> tuple[list[str], Callable[..., list[Any]]]:
    """Returns names and a function of the method's diagnostics; see `jaxprs.with_used_arguments`.

    Its arguments are the leaves of a `state` whose clients are in the store `clients`.
    """
    shapes, structure = jax.tree.flatten(clients.fill(state, clients.shape))
    names: list[str] = []

    def flat_observe(*leaves: Any) -> list[Any]:
        full_state = jax.tree.unflatten(structure, leaves)
        observed = algorithm.observe(full_state._replace(rows=offloaded.join(full_state.rows)))
        names[:] = observed
        return [observed[name] for name in names]

    return names, jaxprs.with_used_arguments(flat_observe, shapes)
