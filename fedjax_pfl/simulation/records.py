"""Records of the compiled rounds: their specification, inputs and outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State
from fedjax_pfl.core.examples import FederatedData


class Log(NamedTuple):
    """Outcome of one round for the sampled clients of an architecture group, in K slots.

    `CompiledRounds.run` adds a leading axis of rounds.
    """

    ids: jax.Array  # int32 [K]: client ids; arbitrary in empty slots
    present: jax.Array  # bool [K]: False for empty slots
    dropped: jax.Array  # bool [K]: downloaded, and never returned its update, or too late
    rejected: jax.Array  # bool [K]: returned an update that is not finite, or too large
    metrics: dict[str, jax.Array]  # training metrics, [K]; 0 for clients whose update is not used
    down: dict[str, jax.Array]  # int32 [K]: bytes downloaded, by layer
    up: dict[str, jax.Array]  # int32 [K]: bytes uploaded, by layer
    seconds: Any = None  # float32 [K]: simulated time that the server waits; None without speeds
    late: Any = None  # bool [K]: missed the deadline; None without speeds

    @property
    def arrived(self) -> jax.Array:
        """Returns bool [K]: clients whose update the server used."""
        return self.present & ~self.dropped & ~self.rejected


class Evaluation(NamedTuple):
    """Scores of each client's model: sums over its examples, arrays of shape [N].

    `after` is None if not requested. With `validate_after`, `validation` is of the same model.
    """

    before: local_training.Scores  # on test examples, by the personalised model
    validation: local_training.Scores  # on validation examples, by the personalised model
    after: local_training.Scores | None  # on test examples, after one more local training


class Slots(NamedTuple):
    """Clients of an architecture group in a cohort, in a fixed number K of slots."""

    ids: Any  # int32 [K]: client ids; arbitrary in empty slots
    present: Any  # bool [K]: False for empty slots


class CohortBatch(NamedTuple):
    """Sampled clients of an architecture group with their inputs, in K slots."""

    slots: Slots  # ids, and which slots are used
    places: jax.Array  # int32 [K]: index of each client in `data`
    data: FederatedData  # of all clients, or of these
    clients: PyTree  # client-side state, leaves [K, ...]


class Slot(NamedTuple):
    """Inputs of one slot of a cohort; stacked for K slots, all leaves are [K, ...]."""

    i: jax.Array  # client id
    place: jax.Array  # index of the client in the data, which may be the cohort's only
    present: jax.Array  # bool: False if no client is sampled into this place
    dropped: jax.Array  # bool: the client downloads and never returns its update
    client: PyTree  # client-side state
    max_steps: Any = None  # int32: local steps that fit before the deadline; None: no limit


class ClientOutcome(NamedTuple):
    """Outcome of one client's round; stacked for K slots, all leaves are [K, ...]."""

    payload: PyTree  # download
    upload: PyTree  # zeros if dropped or rejected
    client: PyTree  # new client-side state
    metrics: dict[str, jax.Array]  # training metrics by name; zeros if dropped or rejected
    is_accepted: jax.Array  # bool: finite, and not too large
    down: dict[str, jax.Array]  # bytes downloaded, by layer
    up: dict[str, jax.Array]  # bytes uploaded, by layer


class RoundCarry(NamedTuple):
    """Carry of the loop over rounds."""

    state: State
    logs: tuple[Log, ...]  # of each architecture group


class RoundSpec(NamedTuple):
    """Static facts that a program of rounds is compiled for.

    Tuples have one entry per architecture group, that is per set of clients with the same network.
    """

    original: Algorithm  # as the user made it
    algorithm: Algorithm  # the same in the form of `groups.as_grouped`
    members: tuple[Algorithm, ...]  # algorithm of each group
    membership: tuple[np.ndarray, ...]  # bool [N] for each group
    federation: Federation  # facts about all N clients
    cohort: int  # number of clients sampled in a round
    max_rounds: int  # most rounds in one call
    sampling: str  # random or cyclic
    dropout: Any  # probability that a sampled client never returns its update
    speeds: Any  # `speeds.Speeds`; None: no simulated time
    max_update_norm: Any  # updates with a larger norm are rejected; None: no limit
    evaluate_after: bool  # also score models after one more local training
    validate_after: bool  # validation uses the models after that training
    evaluated_ids: np.ndarray | None  # None: all clients
    count_confusion: bool  # count confusion matrices on the test examples
    chunk: int  # number of clients that are vmapped together on a device
    mesh: Any  # devices over which clients are spread; None: one device
    is_spread: bool  # server-side rows and client-side state are spread over the mesh


class RoundFunctions(NamedTuple):
    """The rounds of a method as functions that are not compiled yet.

    `start` is the last state of the previous phase. `logs` has a `Log` for each architecture group.

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
    """`RoundFunctions`, compiled: `init`, `run` and `evaluate` take the same arguments.

    `run` uses up the arrays of the state that is passed in.
    """

    init: Any  # Any: compiled functions also have `lower`
    run: Any
    evaluate: Any
    place: Callable[[PyTree], PyTree]  # copies a tree to the devices of the rounds
    enter: Callable[[State], State]  # copies a state to them, in the form that `run` takes
    everywhere: Any  # sharding of trees that `place` returns, for `jax.jit`


class SharedInputs(NamedTuple):
    """Inputs that are equal for all clients when they are sent to, trained or evaluated."""

    key: jax.Array  # random key of the run
    state: Any  # State without the clients; None for functions that must not read it
    data: Any  # FederatedData of all clients or of the cohort; None as for `state`
    t: Any  # index of the round
