"""Records of the compiled rounds: their specification, inputs and outputs."""

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
    dropped: jax.Array  # bool [K]: downloaded, and never returned its update
    rejected: jax.Array  # bool [K]: returned an update that is not finite, or too large
    metrics: dict[str, jax.Array]  # [K] each; 0 for clients that did not arrive
    down: dict[str, jax.Array]  # int32 [K]: bytes downloaded, by layer
    up: dict[str, jax.Array]  # int32 [K]: bytes uploaded, by layer

    @property
    def arrived(self) -> jax.Array:
        """Returns bool [K]: clients whose update the server used."""
        return self.present & ~self.dropped & ~self.rejected


class Evaluation(NamedTuple):
    """Sums over the examples of each client, arrays of shape [N]."""

    before: local_training.Scores  # test examples, the client's personalised model
    validation: local_training.Scores  # the same, or after local training with `validate_after`
    after: local_training.Scores | None  # test examples, after one more local training


class Slots(NamedTuple):
    """Places for the clients of an architecture group in a cohort."""

    ids: Any  # int32 [K]: client ids
    present: Any  # bool [K]: False for empty slots


class CohortBatch(NamedTuple):
    """A group's sampled clients with their inputs, stacked on axis 0 except for the data."""

    slots: Slots
    places: jax.Array  # int32 [K]: index of each client in `data`
    data: FederatedData
    clients: PyTree  # client-side state


class RoundSpec(NamedTuple):
    """Static facts that a program of rounds is compiled for.

    Tuples have one entry per architecture group, that is per set of clients with the same network.
    """

    original: Algorithm  # as the user made it
    algorithm: Algorithm  # the same in the form of `groups.as_grouped`
    members: tuple[Algorithm, ...]  # algorithm of each group
    membership: tuple[np.ndarray, ...]  # bool [N] for each group
    federation: Federation
    cohort: int  # clients sampled in a round
    max_rounds: int  # most rounds in one call
    dropout: Any  # probability that a sampled client never returns its update
    max_update_norm: Any  # larger updates are rejected; None: no limit
    evaluate_after: bool  # also score models after one more local training
    validate_after: bool  # score validation examples with those models
    evaluated_ids: np.ndarray | None  # None: all clients
    count_confusion: bool  # on the test examples
    chunk: int  # clients that are vmapped together
    mesh: Any  # None: one device
    is_spread: bool  # server-side rows and client-side state are spread over the mesh


class RoundFunctions(NamedTuple):
    """The rounds of a method as functions that are not compiled yet.

    init          (key, start=None) -> State
    run           (key, state, data, t, n) -> (state, logs): rounds t to t + n - 1
    evaluate      (key, state, data, t) -> Evaluation

    Parts of these for off-device storage. `state` has no clients here.

    sample_slots  (key, t) -> Slots of each group in round t
    run_cohort    (key, state, cohort_batches, t) -> (state with the cohort's clients, logs)
    score_cohort  (g) -> (key, state, cohort_batch, t) -> Evaluation of clients of group g, [K]
    spec          what the functions are made for
    """

    init: Callable[..., State]
    run: Callable[..., tuple[State, tuple[Log, ...]]]
    evaluate: Callable[..., Evaluation]
    sample_slots: Any = None  # None in sweeps
    run_cohort: Any = None
    score_cohort: Any = None
    spec: Any = None


class CompiledRounds(NamedTuple):
    """`RoundFunctions`, compiled. `run` uses up the arrays of the state that is passed in."""

    init: Any  # Any: compiled functions also have `lower`
    run: Any
    evaluate: Any
    place: Callable[[PyTree], PyTree]  # puts a tree on the devices of the rounds
    enter: Callable[[State], State]  # puts a state there in the form that `run` takes
    everywhere: Any  # sharding of trees that `place` returns, for `jax.jit`


class SharedInputs(NamedTuple):
    """Inputs that are equal for all clients when they are sent to, trained or evaluated."""

    key: jax.Array  # random key of the run
    state: Any  # State without the clients; None for functions that must not read it
    data: FederatedData
    t: Any  # index of the round
