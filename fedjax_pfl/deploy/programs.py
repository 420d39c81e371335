"""Compiled programs of a round: those that clients run and those that the server runs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import groups, local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, Federation, PyTree, State
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.core.randomness import INIT, PERSONAL, RECEIVE, SEND, TRAIN, stage_key
from fedjax_pfl.deploy import split_personalize
from fedjax_pfl.simulation.map_clients import map_clients
from fedjax_pfl.simulation.records import Evaluation
from fedjax_pfl.simulation.rounds import round_functions

_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


class Method(NamedTuple):
    """Method, federation and seed, which the server and all clients know."""

    algorithm: Algorithm
    federation: Federation
    seed: int
    max_update_norm: float | None = None  # updates with a larger norm are rejected; None: no limit
    evaluate_after: bool = True  # also score models after one more local training
    validate_after: bool = False  # validation uses the models after that training

    @property
    def grouped(self) -> Algorithm:
        """Returns the algorithm in the form for several architecture groups, even if it has one."""
        return groups.as_grouped(self.algorithm)

    def group(self, i: int) -> int:
        """Returns the architecture group of a client."""
        return int(self.federation.groups[i]) if groups.has_groups(self.algorithm) else 0

    def group_algorithm(self, g: int) -> Algorithm:
        """Returns the algorithm of group `g`."""
        return groups.group_algorithms(self.algorithm)[g]


class TrainResult(NamedTuple):
    """Result of local training; the client sends all fields except `client`."""

    upload: PyTree
    metrics: dict[str, jax.Array]  # training metrics by name
    finite: jax.Array  # True if upload, trained variables and client-side state are finite
    client: PyTree  # new client-side state


class Shapes(NamedTuple):
    """Shapes of one group's states and messages, against which received messages are checked."""

    state: State  # server state, without the clients' part
    client: PyTree  # client-side state of one client
    payload: PyTree  # download of one client
    result: TrainResult  # result of local training of one client
    served: list[Any]  # arrays from the server for one client's personalised model
    scores: Evaluation  # of one client


def group_shapes(method: Method, g: int, data: FederatedData) -> Shapes:
    """Computes the shapes that the functions of architecture group `g` take and return.

    `data` has the examples of one client, or their shapes.
    """
    key = jax.eval_shape(jax.random.key, 0)
    state = jax.eval_shape(method.grouped.init, key)
    client_state = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), state.clients[g]
    )
    server_state = state._replace(clients=())
    payload = jax.eval_shape(partial(_send, method, g), server_state, _NUMBER, _NUMBER)
    inputs = RoundInputs(_NUMBER, _NUMBER, data)
    result = jax.eval_shape(partial(_train, method, g), payload, client_state, inputs)
    served = jax.eval_shape(
        partial(_server_part, method, g, client_state, data), server_state, _NUMBER, _NUMBER
    )
    score = partial(_score, method, g, server_state)
    return Shapes(
        state=server_state,
        client=client_state,
        payload=payload,
        result=result,
        served=served,
        scores=jax.eval_shape(score, served, payload, client_state, inputs),
    )


class RoundInputs(NamedTuple):
    """Client id, round and examples that a client's program computes with."""

    i: Any  # client id
    t: Any  # index of the round
    data: FederatedData  # of this client alone


class ClientPrograms:
    """Compiled programs that the clients of one architecture group run.

    Clients with examples of the same shapes share them.

    Args:
      method: Method of the federation.
      g: Index of the group.
      data: Examples of one client, or their shapes.
    """

    def __init__(self, method: Method, g: int, data: FederatedData) -> None:
        def initial_state(i: jax.Array) -> PyTree:
            state = method.grouped.init(stage_key(_key(method), INIT))
            return trees.row(state.clients[g], i)

        self.method = method
        self.shapes = group_shapes(method, g, data)
        self._initial_state = jax.jit(initial_state)
        self._train = jax.jit(partial(_train, method, g))
        self._score = jax.jit(partial(_score, method, g, self.shapes.state))
        self._client_part = jax.jit(partial(_client_part, method, g, self.shapes.state))

    def initial_state(self, i: int) -> PyTree:
        """Returns the client-side state of client `i` before its first round."""
        return jax.device_get(self._initial_state(np.int32(i)))

    def train(self, payload: PyTree, client: PyTree, inputs: RoundInputs) -> TrainResult:
        """Trains a client locally for one round, from its payload and client-side state."""
        return jax.device_get(self._train(payload, client, inputs))

    def score(
        self, served_values: Any, payload: PyTree, client: PyTree, inputs: RoundInputs
    ) -> Evaluation:
        """Evaluates a client's model on its examples, as a simulation does.

        Args:
          served_values: Arrays from the server that the client's personalised model is computed
            from, of the shapes `shapes.served`.
          payload: Download for training; unused unless models are evaluated after local training.
          client: Client-side state.
          inputs: Client id, round and examples.
        """
        return jax.device_get(self._score(served_values, payload, client, inputs))

    def personalize(self, served_values: Any, client: PyTree, inputs: RoundInputs) -> PyTree:
        """Returns the variables of the client's personalised model. For arguments see `score`."""
        return jax.device_get(self._client_part(served_values, client, inputs))


class ServerPrograms:
    """Compiled programs that the server runs. Its State has () as `clients`.

    `send`, `check_upload` and `server_part` are tuples with a program for each architecture group.

    Args:
      method: Method of the federation.
      data: Examples of one client, of which only shapes and types are used.
      cohort: Clients per round.
    """

    def __init__(self, method: Method, data: FederatedData, cohort: int) -> None:
        self.method, self.cohort = method, cohort
        data = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data)
        group_indices = range(len(groups.group_algorithms(method.algorithm)))
        self.shapes = tuple(group_shapes(method, g, data) for g in group_indices)

        def init() -> State:  # clients initialise their own part
            return method.grouped.init(stage_key(_key(method), INIT))._replace(clients=())

        self.init = jax.jit(init)
        self.receive = jax.jit(method.grouped.receive)
        round_programs = round_functions(method.algorithm, method.federation, cohort=cohort)
        self.sample_slots = jax.jit(partial(round_programs.sample_slots, _key(method)))
        self.send = tuple(jax.jit(partial(_send_all, method, g)) for g in group_indices)
        self.check_upload = tuple(jax.jit(partial(_check_upload, method, g)) for g in group_indices)
        self.server_part = tuple(
            jax.jit(partial(_server_part, method, g, self.shapes[g].client, data))
            for g in group_indices
        )

    def build_cohort(self, g: int, ids: Any, payloads: PyTree, uploads: PyTree, t: int) -> Cohort:
        """Builds the cohort of group `g` in round `t` as the simulation does.

        `ids` has, for each of the K slots, the client with an accepted upload, or None: the slot
        gets an id out of range and weight 0. Leaves of payloads and uploads are [K, ...].
        """
        n = self.method.federation.clients
        has_upload = np.array([i is not None for i in ids])
        padded_ids = np.array([n if i is None else i for i in ids], np.int32)
        counts = np.append(self.method.federation.counts, 0).astype(np.float32)
        # NumPy arrays where the type asks for JAX arrays: compiled programs take both.
        slots: dict[str, Any] = {
            "ids": padded_ids,
            "arrived": has_upload,
            "weights": counts[padded_ids],
        }
        key = stage_key(_key(self.method), RECEIVE, t)
        return Cohort(**slots, payloads=payloads, uploads=uploads, t=np.int32(t), key=key)


# Programs of one client: `g` is the index of its architecture group, `payload` its download,
# `client` its client-side state, and `inputs` its id, the round and its examples.


def _key(method: Method) -> jax.Array:
    """Returns the random key of the run's seed."""
    return jax.random.key(method.seed)


def _send(method: Method, g: int, state: State, i: jax.Array, t: jax.Array) -> PyTree:
    """Returns the payload of client `i` of group `g` in round `t`."""
    return method.group_algorithm(g).send(state, _context(method, SEND, i, t))


def _send_all(method: Method, g: int, state: State, ids: jax.Array, t: jax.Array) -> PyTree:
    """Returns the payloads of the clients `ids` [K] of group `g` in round `t`, [K, ...].

    They are computed in blocks of clients as in the simulation, which sets the order of sums.
    """

    def send(inputs: tuple[State, jax.Array], i: jax.Array) -> PyTree:
        return _send(method, g, inputs[0], i, inputs[1])

    def payload(_: Any, item: tuple[jax.Array, PyTree]) -> PyTree:
        return item[1]

    all_present = jnp.ones(len(ids), bool)
    return map_clients(payload, (), ids, all_present, 1, None, send, (state, t))


def _context(method: Method, stage: int, i: Any, t: Any, data: Any = None) -> ClientContext:
    """Returns the context of client `i` in round `t`; `data` may hold shapes only.

    `stage` is a number of `core.randomness`, such as TRAIN, which the random key depends on.
    """
    examples = None
    if data is not None:
        has_shapes = isinstance(jax.tree.leaves(data)[0], jax.ShapeDtypeStruct)
        examples = (
            jax.eval_shape(client_data, data, _NUMBER) if has_shapes else client_data(data, 0)
        )
    return ClientContext(i=i, data=examples, t=t, key=stage_key(_key(method), stage, t, i))


def _train(
    method: Method, g: int, payload: PyTree, client: PyTree, inputs: RoundInputs
) -> TrainResult:
    """Trains a client locally for a round."""
    ctx = _context(method, TRAIN, *inputs)
    upload, variables, new, metrics = method.group_algorithm(g).train(payload, client, ctx)
    return TrainResult(
        upload=upload,
        metrics=metrics,
        finite=trees.all_finite((upload, variables, new)),
        client=new,
    )


def _check_upload(
    method: Method, g: int, payload: PyTree, upload: PyTree
) -> tuple[jax.Array, dict[str, Any], dict[str, Any]]:
    """Checks an upload, and counts the bytes of the round's download and upload.

    An upload is rejected if it is not finite, if the norm of its change overflows float32, or if
    that norm exceeds `max_update_norm`.
    Returns True if it is accepted, bytes downloaded by layer, and bytes uploaded by layer.
    """
    squared_change = trees.squared_norm(trees.change(payload, upload))
    accepted = trees.all_finite(upload) & jnp.isfinite(squared_change)
    if method.max_update_norm is not None:
        accepted &= squared_change <= jnp.square(jnp.float32(method.max_update_norm))
    traffic = method.group_algorithm(g).traffic(payload, upload)
    down, up = (jax.tree.map(jnp.int32, part) for part in traffic)
    return accepted, down, up


def _server_part(
    method: Method, g: int, client: PyTree, data: Any, state: State, i: jax.Array, t: jax.Array
) -> list[Any]:
    """Computes the arrays that client `i` needs from the server for its personalised model.

    Of `client` and `data`, its examples, only shapes are used.
    """
    ctx = _context(method, PERSONAL, i, t, data)
    return split_personalize.server_part(method.group_algorithm(g).personalize, state, client, ctx)


def _client_part(
    method: Method, g: int, state: State, served_values: Any, client: PyTree, inputs: RoundInputs
) -> PyTree:
    """Returns the variables of a client's personalised model, computed on the client.

    `served_values` are the results of `_server_part`; of `state`, the server's, shapes are enough.
    """
    ctx = _context(method, PERSONAL, *inputs)
    return split_personalize.client_part(
        method.group_algorithm(g).personalize, served_values, state, client, ctx
    )


def _score(
    method: Method,
    g: int,
    state: State,
    served_values: Any,
    payload: PyTree,
    client: PyTree,
    inputs: RoundInputs,
) -> Evaluation:
    """Evaluates one client as the simulation does. For arguments see `ClientPrograms.score`."""
    algorithm = method.group_algorithm(g)
    client_examples = client_data(inputs.data, 0)
    test = Split(inputs.data.test.rows[0], inputs.data.test.size[0])

    def score(variables: PyTree, split: Split) -> local_training.Scores:
        """Returns sums over the client's examples in a split."""
        return local_training.evaluate(
            algorithm.predict, variables, client_examples, split, method.federation.task
        )

    model = _client_part(method, g, state, served_values, client, inputs)
    before, validation = score(model, test), score(model, client_examples.validation)
    if not method.evaluate_after:
        return Evaluation(before, validation, None)
    _, trained, _, _ = algorithm.train(payload, client, _context(method, TRAIN, *inputs))
    if method.validate_after:
        validation = score(trained, client_examples.validation)
    return Evaluation(before, validation, score(trained, test))


def single_client(data: FederatedData, i: int) -> FederatedData:
    """Returns the examples of client `i` as data of a single client, padded with zero examples.

    Results of all clients have the same shapes: clients on one machine share compiled programs.
    """
    splits = {name: getattr(data, name) for name in ("train", "validation", "test")}

    def used_rows(j: int) -> np.ndarray:
        """Returns the sorted indices of all examples of client `j`."""
        rows = [np.asarray(split.rows[j])[: int(split.size[j])] for split in splits.values()]
        return np.unique(np.concatenate(rows))

    rows_of_client = used_rows(i)
    width = max(len(used_rows(j)) for j in range(len(data.train.size)))

    def table(split: Split) -> Split:
        """Returns the split of client `i`, with indices into its own examples."""
        rows, size = np.asarray(split.rows[i]), int(split.size[i])
        is_used = np.arange(len(rows)) < size
        positions = np.where(is_used, np.searchsorted(rows_of_client, rows), 0)
        arrays: Any = positions.astype(np.int32)[None], np.array([size], np.int32)
        return Split(*arrays)

    def examples(all_examples: Any) -> Any:
        selected = np.asarray(all_examples)[rows_of_client]
        return np.pad(selected, [(0, width - len(selected)), *[(0, 0)] * (selected.ndim - 1)])

    def row(stack: Any) -> Any:
        return None if stack is None else np.asarray(stack)[i : i + 1]

    return data._replace(
        x=examples(data.x),
        y=examples(data.y),
        label_map=row(data.label_map),
        classes=row(data.classes),
        **{name: table(split) for name, split in splits.items()},
    )
