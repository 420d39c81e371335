"""What rounds are made for, what goes into one and what comes out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State
from fedjax_pfl.core.examples import FederatedData


class Log(NamedTuple):
    """Outcome of a group's cohort. `CompiledRounds.run` adds a leading axis of rounds."""

    ids: jax.Array  # int32 [K]
    present: jax.Array  # bool [K]: sampled into this slot
    dropped: jax.Array  # bool [K]: downloaded and never answered
    rejected: jax.Array  # bool [K]: the answer was not finite, or too large
    metrics: dict[str, jax.Array]  # [K] each, of those that arrived
    down: dict[str, jax.Array]  # int32 [K] bytes by layer
    up: dict[str, jax.Array]

    @property
    def arrived(self) -> jax.Array:
        """bool [K]: the answer counted."""
        return self.present & ~self.dropped & ~self.rejected


class Evaluation(NamedTuple):
    """Sums over each client's examples, [N]: as served, and after one more local training."""

    before: local_training.Scores
    validation: local_training.Scores  # as served or, where that is to choose, after local training
    after: local_training.Scores | None


class Slots(NamedTuple):
    """A group's places in a cohort."""

    ids: Any  # int32 [K]
    present: Any  # bool [K]: which are taken


class CohortBatch(NamedTuple):
    """A group's clients that are computed, and what they bring; stacked on axis 0 but for data."""

    slots: Slots
    places: jax.Array  # int32 [K]: which clients of `data` they are
    data: FederatedData
    clients: PyTree


class RoundFunctions(NamedTuple):
    """An algorithm's rounds, to be compiled.

    init      (key, start=None) -> State
    run       (key, state, data, t, n) -> (state, logs): rounds t .. t+n-1, n up to `calls`
    evaluate  (key, state, data, t) -> Evaluation

    Of these, the parts for clients and examples that lie elsewhere; with several groups or one,
    parties are a tuple. `shared` is a state without the clients.

    seats     (key, t) -> Seats of each group: who is in round t
    meet      (key, shared, parties, t) -> (state with the parties' clients after it, logs)
    score     (g) -> (key, shared, party, t) -> Evaluation of those of a group, [K]
    how       what they are made for
    """

    init: Callable[..., State]
    run: Callable[..., tuple[State, tuple[Log, ...]]]
    evaluate: Callable[..., Evaluation]
    slots: Any = None  # of a sweep, there are none of these
    meet: Any = None
    score: Any = None
    spec: Any = None


class CompiledRounds(NamedTuple):
    """As Plain, compiled; `run` uses up the state that it is given."""

    init: Any  # compiled functions can also be lowered, which Callable does not say
    run: Any
    evaluate: Any
    place: Callable[[PyTree], PyTree]  # puts a tree on the devices that the rounds run on
    enter: Callable[[State], State]  # puts a state there, as `run` takes it
    everywhere: Any  # where a tree is that `place` has put, for `jax.jit`


class RoundSpec(NamedTuple):
    """What a program of rounds is made for; none of it is traced. Groups of clients in tuples."""

    given: Algorithm
    algorithm: Algorithm  # as `groups.grouped` makes it
    members: tuple[Algorithm, ...]
    membership: tuple[np.ndarray, ...]  # bool [N] for each group
    federation: Federation
    cohort: int
    calls: int
    dropout: Any
    max_update_norm: Any
    after: bool
    validate_after: bool
    evaluated: np.ndarray | None
    chunk: int
    mesh: Any  # or None
    spread: bool  # whether a state's rows and clients are spread over the mesh


class SharedInputs(NamedTuple):
    """What all clients of a stage have in common."""

    key: jax.Array
    state: Any  # without the clients; None for what is not to read it
    data: FederatedData
    t: Any
