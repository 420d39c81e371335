"""The contract: a federated algorithm is a tuple of pure functions over an explicit state.

Hyper-parameters are closed over by the factory that builds the algorithm; whatever changes is in
`State` and is passed in and out. Each function but `init` and `receive` is written for ONE client;
the simulation maps it over the cohort.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.examples import ClientData
from fedjax_pfl.core.task import Task, classification

PyTree = Any


class State(NamedTuple):
    """Everything that a run carries from one round to the next; any part may be empty, `()`."""

    server: PyTree  # what all share: a global model, a hypernetwork, a pool of blocks
    rows: PyTree  # what the server keeps for each client, stacked on axis 0
    clients: PyTree  # what stays with each client, stacked on axis 0 (per group, if there are some)


class Visit(NamedTuple):
    """One client in one round."""

    i: Any  # its id
    data: ClientData | Any  # its examples but for those of the test; None where the server acts
    t: Any  # the round
    key: Any  # a function of (seed, stage, round, client) and of nothing else


class Trained(NamedTuple):
    """What a client's local work leaves."""

    upload: PyTree  # what travels
    variables: PyTree  # the model after it, as it is evaluated
    client: PyTree  # what stays with the client
    metrics: dict[str, jax.Array]  # scalars, among them `loss`


class Cohort(NamedTuple):
    """All of a round, stacked on axis 0.

    A seat whose client did not arrive has an id out of range, which writes drop, and the weight 0.
    What its payload and upload hold is not specified: `mean` and `put` pass over it.
    """

    ids: jax.Array  # int32 [K]
    arrived: jax.Array  # bool [K]
    weights: jax.Array  # float32 [K]: training examples n_k
    payloads: PyTree
    uploads: PyTree
    t: Any

    def mean(self, tree: PyTree, old: PyTree, weights: jax.Array | None = None) -> PyTree:
        """Σ_k w_k x_k / Σ_k w_k over those that arrived; `old` where all weights are 0.

        Args:
          tree: stacked as the uploads are.
          weights: [K], or bool; unset: n_k.
        """
        share = jnp.asarray(self.weights if weights is None else weights, jnp.float32)
        share = jnp.where(self.arrived, share, 0.0)
        anyone = jnp.any(share > 0)
        mean = trees.weighted_mean(self.present(tree), jnp.where(anyone, share, 1.0))
        return trees.where(anyone, mean, old)

    def put(self, rows: PyTree, values: PyTree) -> PyTree:
        """The rows with `values`, stacked, in those of the clients that arrived."""

        def write(_: Any, whole: PyTree) -> PyTree:
            return trees.put(whole, self.ids, values)

        # A loop of one step, as XLA writes in place in a loop alone: else, where `values` were made
        # from other clients' rows, it would copy those of all clients before.
        return jax.lax.fori_loop(0, self.arrived.any().astype(jnp.int32), write, rows)

    def present(self, tree: PyTree) -> PyTree:
        """A tree that is stacked as the uploads are, zero where a client did not arrive."""
        return trees.where(self.arrived, tree, jax.tree.map(jnp.zeros_like, tree))


class Federation(NamedTuple):
    """What is known of the clients before training starts. NumPy, never traced."""

    counts: np.ndarray  # int [N]: training examples of each client
    input_shape: tuple[int, ...]  # one example, without the batch axis
    outputs: int  # classes, or targets of a regression
    active: np.ndarray  # bool [N]: clients outside are evaluated but never sampled
    groups: np.ndarray  # int [N]: architecture group of each client, 0 where there is one only
    validation_counts: np.ndarray | None = None  # int [N], likewise; None: there are none
    class_counts: np.ndarray | None = None  # int [N, classes as stored]: `counts` by class
    owners: tuple[str, ...] | None = None  # whose examples each has, where somebody owns them
    input_dtype: str = "float32"  # as `examples.take` gives them; int32 of tokens
    each: tuple[int, ...] = ()  # (T,) where each of T positions has `outputs` of its own

    task: Task = classification()  # loss and metrics

    # What the numbers of examples stand for (columns, classes, characters), as plain data
    about: Mapping[str, Any] | None = None

    @property
    def clients(self) -> int:
        return len(self.counts)

    def examples(self, n: int = 1) -> jax.Array:
        """So many of zeros, to draw a network with."""
        return jnp.zeros((n, *self.input_shape), self.input_dtype)


class Traffic(NamedTuple):
    """Bytes that one client moves in one round, by layer name."""

    down: dict[str, Any]
    up: dict[str, Any]


def everything(payload: PyTree, upload: PyTree) -> Traffic:
    """The default bill: all of the payload comes down, all of the upload goes up."""
    return Traffic(trees.bytes_per_layer(payload), trees.bytes_per_layer(upload))


def nothing(state: State) -> dict[str, jax.Array]:
    """The default observation."""
    del state
    return {}


class Algorithm(NamedTuple):
    """A federated method.

    init      (key, start=None) -> State. `start` is the state that an earlier phase ended in.
    send      (state, visit) -> payload. What client `visit.i` downloads.
    train     (payload, client, visit) -> Trained. Local work.
    receive   (state, cohort) -> (server, rows). The cohort at once; not called when nobody arrived.
    personal  (state, client, visit) -> variables. What the client is served now.
    predict   (variables, x) -> outputs.
    traffic   (payload, upload) -> Traffic, in bytes.
    observe   (state) -> {name: array}. What a run records of the state at every evaluation.
    far       names of the parts of `rows` that may lie off the devices: what reads them does so
              by `far.take`, which is `trees.row`, `far.mixed` and `far.each`; see there.

    The state that `send`, `receive` and `personal` see has no clients, `()`: a server cannot look
    into them. `visit.data` is None in `send`, for the same reason.

    Where clients have different architectures, `send`, `train`, `personal`, `predict` and `traffic`
    are tuples with one function per group, `State.clients` is a tuple of trees, each with a row
    for all N clients, and `receive` is given a tuple of cohorts.
    """

    init: Callable[..., State]
    send: Any
    train: Any
    receive: Callable[[State, Any], tuple[PyTree, PyTree]]
    personal: Any
    predict: Any
    traffic: Any = everything
    observe: Callable[[State], dict[str, jax.Array]] = nothing
    far: tuple[str, ...] = ()
