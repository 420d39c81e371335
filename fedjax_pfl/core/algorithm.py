"""The contract: a federated algorithm is a tuple of pure functions over an explicit state.

Hyper-parameters are closed over by the factory that builds the algorithm; whatever changes is in
`State` and is passed in and out. Each function but `init` and `receive` is written for ONE client;
the engine in `rounds.py` maps it over the cohort.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import trees

PyTree = Any


class State(NamedTuple):
    """Everything that a run carries from one round to the next; any part may be empty, `()`."""

    server: PyTree  # what all share: a global model, a hypernetwork, a pool of blocks
    rows: PyTree  # what the server keeps for each client, stacked on axis 0
    clients: PyTree  # what stays with each client, stacked on axis 0 (per group, if there are some)


class Federation(NamedTuple):
    """What is known of the clients before training starts. NumPy, never traced."""

    counts: np.ndarray  # int [N]: training examples of each client
    input_shape: tuple[int, ...]  # one example, without the batch axis
    outputs: int  # classes, or targets of a regression
    active: np.ndarray  # bool [N]: clients outside are evaluated but never sampled
    groups: np.ndarray  # int [N]: architecture group of each client, 0 where there is one only
    validation_counts: np.ndarray | None = None  # int [N], likewise; None: there are none
    class_counts: np.ndarray | None = None  # int [N, classes as stored]: `counts` by class

    @property
    def clients(self) -> int:
        return len(self.counts)


class Traffic(NamedTuple):
    """Bytes that one client moves in one round, by layer name."""

    down: dict[str, Any]
    up: dict[str, Any]


def everything(payload: PyTree, upload: PyTree) -> Traffic:
    """The default bill: all of the payload comes down, all of the upload goes up."""
    return Traffic(trees.bytes_per_layer(payload), trees.bytes_per_layer(upload))


class Algorithm(NamedTuple):
    """A federated method.

    With K clients in a round's cohort, i a client's id, t the round and `key` a key that depends on
    nothing but (seed, stage, round, client):

    init      (key, start=None) -> State. `start` is the state that an earlier phase ended in.
    send      (server, rows, i, t, key) -> payload. What client i downloads.
    train     (payload, client, data, t, key) -> (upload, trained, client, metrics). Local work.
              `trained` are the variables after it, `client` what stays there, `metrics` scalars,
              among them `loss`.
    receive   (server, rows, ids, arrived, payloads, uploads, t) -> (server, rows). The cohort at
              once, stacked on axis 0. Where `arrived` is false, the id is out of range (scatters
              drop it) and the upload is zero; it is not called when nobody arrived.
    personal  (server, rows, client, i, data, t, key) -> variables. What client i is served now.
    predict   (variables, x) -> outputs.
    traffic   (payload, upload) -> Traffic, in bytes.
    observe   (state) -> {name: array}. What a run records of the state at every evaluation.

    Where clients have different architectures, `send`, `train`, `personal`, `predict` and `traffic`
    are tuples with one function per group, `State.clients` is a tuple of trees, each with a row
    for all N clients, and `ids`, `arrived`, `payloads` and `uploads` come to `receive` as tuples.
    """

    init: Callable[..., State]
    send: Any
    train: Any
    receive: Callable[..., tuple[PyTree, PyTree]]
    personal: Any
    predict: Any
    traffic: Any = everything
    observe: Callable[[State], dict[str, jax.Array]] = lambda state: {}
