"""The method contract: a federated method is a record of pure functions over an explicit state.

A factory binds hyper-parameters by closure and returns an `Algorithm`. All functions except `init`
and `receive` are written for one client; the simulation maps them over the cohort.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import offload, trees
from fedjax_pfl.core.examples import ClientData
from fedjax_pfl.core.task import Task, classification

PyTree = Any
_BLOCK = 32  # clients whose rows are computed at a time
_LARGE_BLOCK = 128  # clients of a product with the rows of all clients
_NO_CLIENT = np.iinfo(np.int32).max  # an id out of range


class State(NamedTuple):
    """Everything that changes from round to round. Any part may be empty, ()."""

    server: PyTree  # shared by all clients: a global model, a hypernetwork, a pool of blocks
    rows: PyTree  # server-side rows, one per client, stacked on axis 0
    clients: PyTree  # client-side state, stacked on axis 0; a tuple of trees if there are groups


class ClientContext(NamedTuple):
    """One client in one round."""

    i: Any  # client id, int32 []
    data: ClientData | Any  # training and validation examples; None in `send`
    t: Any  # round, int32 []
    key: Any  # random key for this client, round and function (send, train, ...)
    max_steps: Any = None  # int32 []: local steps that fit before the deadline; None: no limit


class ClientResult(NamedTuple):
    """Result of a client's local training."""

    upload: PyTree  # sent to the server
    variables: PyTree  # the trained model, as `Algorithm.predict` takes it
    client: PyTree  # new client-side state of this client
    metrics: dict[str, jax.Array]  # scalars by name; `loss`, the training loss, is required


class Cohort(NamedTuple):
    """Results of the K sampled clients of a round, stacked on axis 0.

    The slot of an absent client has an id out of range and weight 0, so writes skip it. Its payload
    and upload are undefined; `mean` and `put` ignore them.
    """

    ids: jax.Array  # int32 [K]: client ids
    arrived: jax.Array  # bool [K]: the client's update is accepted
    weights: jax.Array  # float32 [K]: number of training examples n_k
    payloads: PyTree  # downloads, leaves [K, ...]
    uploads: PyTree  # leaves [K, ...]
    t: Any  # round
    key: Any = None  # random key of the server's update in this round

    def mean(self, tree: PyTree, old: PyTree, weights: jax.Array | None = None) -> PyTree:
        """Computes Σ_k w_k x_k / Σ_k w_k over the clients that arrived.

        Args:
          tree: Leaves x of shape [K, ...], such as the uploads.
          old: Tree of leaves [...]; returned if all weights are 0 or no client arrived.
          weights: Array of shape [K], float or bool. Default: numbers of examples n_k.
        """
        share = jnp.asarray(self.weights if weights is None else weights, jnp.float32)
        share = jnp.where(self.arrived, share, 0.0)
        any_weight = jnp.any(share > 0)
        mean = trees.weighted_mean(self.present(tree), jnp.where(any_weight, share, 1.0))
        return trees.where(any_weight, mean, old)

    def put(self, rows: PyTree, values: PyTree) -> PyTree:
        """Returns `rows` [N, ...] with `values` [K, ...] written for the clients that arrived."""

        def write(_: Any, all_rows: PyTree) -> PyTree:
            return trees.put(all_rows, self.ids, values)

        # A loop of one step: XLA writes in place only inside loops, and would otherwise copy the
        # rows of all clients if `values` were computed from them.
        return jax.lax.fori_loop(0, self.arrived.any().astype(jnp.int32), write, rows)

    def update(self, rows: PyTree, f: Callable[..., PyTree], *inputs: PyTree) -> PyTree:
        """Returns `rows` [N, ...] with f(row, *inputs) for the clients that arrived.

        Like `put`, without the new rows of all clients in memory: it computes a block of clients at
        a time. `f` is written for one client; `inputs` are trees with leaves [K, ...].
        """
        step, blocks = self._blocks(_BLOCK)

        def update_block(b: Any, all_rows: PyTree) -> PyTree:
            start, (ids, *block) = self._block(b, step, (self.ids, *inputs))
            is_new = start + jnp.arange(step) >= b * step
            new = jax.vmap(f)(trees.row(all_rows, ids), *block)
            return trees.put(all_rows, jnp.where(is_new, ids, _NO_CLIENT), new)

        if offload.offloaded_leaves(rows):
            new = jax.lax.map(
                lambda args: f(trees.row(rows, args[0]), *args[1:]),
                (self.ids, *inputs),
                batch_size=step,
            )
            return self.put(rows, new)
        return jax.lax.fori_loop(0, jnp.where(self.arrived.any(), blocks, 0), update_block, rows)

    def map(self, f: Callable[..., PyTree], *inputs: PyTree) -> PyTree:
        """Returns f(*inputs) of each of the K clients, leaves [K, ...].

        Like vmap, without what `f` computes for all clients in memory: it computes a block of
        clients at a time, large enough for fast products with the rows of all clients.
        """
        step, blocks = self._blocks(_LARGE_BLOCK)

        def map_block(b: Any, results: PyTree) -> PyTree:
            start, block = self._block(b, step, inputs)
            return jax.tree.map(
                lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, start, 0),
                results,
                jax.vmap(f)(*block),
            )

        shapes = jax.eval_shape(jax.vmap(f), *inputs)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.fori_loop(0, blocks, map_block, zeros)

    def _blocks(self, most: int) -> tuple[int, int]:
        """Returns the clients in a block, at most `most`, and the number of blocks."""
        blocks = -(-len(self.ids) // most)
        return -(-len(self.ids) // blocks), blocks

    def _block(self, b: Any, step: int, tree: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the first slot of block `b` and the block of each leaf [K, ...].

        The last block overlaps the one before if K is no multiple of `step`.
        """
        start = jnp.minimum(b * step, len(self.ids) - step)
        return start, jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, step), tree)

    def present(self, tree: PyTree) -> PyTree:
        """Returns a tree, leaves [K, ...], with zeros in the slots of absent clients."""
        return trees.zero_unless(self.arrived, tree)


class Federation(NamedTuple):
    """Facts about the clients that are known before training. NumPy arrays, never traced.

    `class_counts`, int [N, stored classes], is `counts` by class; None without classes or in a
    deployment. If a phase trains the held-out clients, `earlier`, bool [N], marks the clients
    that trained before; else it is None. `metadata` has the names of columns, classes and
    characters as plain data; None without such names.
    """

    counts: np.ndarray  # int [N]: number of training examples of each client
    input_shape: tuple[int, ...]  # shape of one example
    outputs: int  # number of classes, or of regression targets
    active: np.ndarray  # bool [N]: False for clients that are evaluated and never sampled
    groups: np.ndarray  # int [N]: architecture group of each client; 0 if all have one network
    validation_counts: np.ndarray | None = None  # int [N]: validation examples of each client
    class_counts: np.ndarray | None = None
    owners: tuple[str, ...] | None = None  # name of each client in the dataset, such as a writer
    input_dtype: str = "float32"  # int32 for tokens
    positions: tuple[int, ...] = ()  # (T,) if a model returns [B, T, outputs]; () for [B, outputs]
    task: Task = classification()  # loss and metrics
    metadata: Mapping[str, Any] | None = None
    earlier: np.ndarray | None = None

    @property
    def trained(self) -> np.ndarray:
        """Returns bool [N]: the active clients and those that trained before them."""
        return self.active if self.earlier is None else self.active | self.earlier

    @property
    def least_contributors(self) -> int:
        """Returns the least number of `contributors` that a client has."""
        return int(np.sum(self.active if self.earlier is None else self.earlier))

    def contributors(self, i: Any) -> jax.Array:
        """Returns bool [N]: the clients whose stored models the server may mix for client `i`.

        Clients of an earlier phase are not sampled any more, so their models do not depend on those
        of newcomers.
        """
        active = jnp.asarray(self.active)
        return active if self.earlier is None else active[i] & active | self.earlier

    @property
    def clients(self) -> int:
        """Returns the number of clients N."""
        return len(self.counts)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a network's outputs for one example."""
        return (*self.positions, self.outputs)

    def examples(self, n: int = 1) -> jax.Array:
        """Returns `n` zero examples, [n, *input_shape], for initialising a network."""
        return jnp.zeros((n, *self.input_shape), self.input_dtype)


class Traffic(NamedTuple):
    """Bytes that one client transfers in one round: int or int32 [] by layer name."""

    down: dict[str, Any]  # download
    up: dict[str, Any]  # upload


def full_traffic(payload: PyTree, upload: PyTree) -> Traffic:
    """Counts all bytes of the payload as download and of the upload as upload (the default)."""
    return Traffic(down=trees.bytes_per_layer(payload), up=trees.bytes_per_layer(upload))


def no_observations(state: State) -> dict[str, jax.Array]:
    """Returns {}: no arrays to record (the default `Algorithm.observe`)."""
    del state
    return {}


class Algorithm(NamedTuple):
    """A federated method.

    init         (key, start=None) -> State. `start` is the final state of the earlier phase, if a
                 run has several phases, each with its own algorithm.
    send         (state, ctx) -> payload. The download of client `ctx.i`.
    train        (payload, client, ctx) -> ClientResult. Local training.
    receive      (state, cohort) -> (server, rows). Server update; skipped if no client arrived.
    personalize  (state, client, ctx) -> variables. The client's personalised model.
    predict      (variables, x) -> outputs.
    traffic      (payload, upload) -> Traffic. Bytes that one client transfers.
    observe      (state) -> {name: array}. Arrays that a run records at every evaluation.
    offload      names of the parts of `rows` that may be stored off the device; see `core.offload`.
    kept_change  share of a client's change that its own next start contains, sent or not: 0 if
                 clients start from the download, 1 if they train on from their own model. A mapping
                 has the shares by layer, 0 for others; a function (payload, client, ctx) returns
                 the share of the last change that the start of this round contains.

    In `send`, `receive` and `personalize` the state has no clients, (): a server cannot read
    client-side state. `ctx.data` is None in `send` for the same reason.

    With several architectures, `send`, `train`, `personalize`, `predict`, `traffic` and
    `kept_change` are tuples with one entry per group, `State.clients` is a tuple of trees with a
    row for all N clients each, and `receive` gets a tuple of cohorts.
    """

    init: Callable[..., State]
    send: Any
    train: Any
    receive: Callable[[State, Any], tuple[PyTree, PyTree]]
    personalize: Any
    predict: Any
    traffic: Any = full_traffic
    observe: Callable[[State], dict[str, jax.Array]] = no_observations
    offload: tuple[str, ...] = ()
    kept_change: Any = 0.0
