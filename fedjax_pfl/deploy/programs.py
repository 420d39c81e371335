"""Compiled parts of a round, one for each place that computes."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import groups, local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, Federation, PyTree, State
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.core.randomness import INIT, PERSONAL, SEND, TRAIN, stage_key
from fedjax_pfl.deploy import served
from fedjax_pfl.simulation.records import Evaluation
from fedjax_pfl.simulation.rounds import round_functions

_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


class Method(NamedTuple):
    """Everything that both sides know of a federation: its method, sizes and seed."""

    algorithm: Algorithm
    federation: Federation
    seed: int
    max_update_norm: float | None = None
    after: bool = True
    validate_after: bool = False

    @property
    def whole(self) -> Algorithm:
        """The algorithm as one of groups."""
        return groups.as_grouped(self.algorithm)

    def group(self, i: int) -> int:
        """Returns the architecture group of a client."""
        return int(self.federation.groups[i]) if groups.has_groups(self.algorithm) else 0

    def member(self, g: int) -> Algorithm:
        return groups.group_algorithms(self.algorithm)[g]


class Answer(NamedTuple):
    """Result of a client's visit; all but `client` is sent."""

    upload: PyTree
    metrics: dict[str, jax.Array]
    fine: jax.Array  # whether upload, trained variables and its own state are finite
    client: PyTree


class Shapes(NamedTuple):
    """Shapes of one group's messages, which readers require."""

    state: State  # the server's, without clients
    client: PyTree
    payload: PyTree
    answer: Answer
    served: list[Any]
    scores: Evaluation


def shapes(method: Method, g: int, data: FederatedData) -> Shapes:
    """Computes the shapes that a group's functions take and return.

    Args:
      data: of one client, or its shapes.
    """
    key = jax.eval_shape(jax.random.key, 0)
    state = jax.eval_shape(method.whole.init, key)
    client = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), state.clients[g])
    seen = state._replace(clients=())
    member = method.member(g)
    payload = jax.eval_shape(member.send, seen, ClientContext(_NUMBER, None, _NUMBER, key))
    ctx = (_NUMBER, _NUMBER, data)
    answer = jax.eval_shape(partial(_work, method, g), payload, client, *ctx)
    crossing = jax.eval_shape(partial(_serve, method, g, client, data), seen, _NUMBER, _NUMBER)
    score = partial(_score, method, g, seen)
    scores = jax.eval_shape(score, crossing, payload, client, *ctx)
    return Shapes(seen, client, payload, answer, crossing, scores)


class At(NamedTuple):
    """Client, round and examples of a visit."""

    i: Any
    t: Any
    data: FederatedData


def at(i: int, t: int, data: FederatedData) -> At:
    """Converts numbers to the types of compiled programs."""
    return At(np.int32(i), np.int32(t), data)


class AtClient:
    """Programs of the clients of one group."""

    def __init__(self, method: Method, g: int, data: FederatedData) -> None:
        self.method, self.g = method, g
        self.shapes = shapes(method, g, data)
        self._first = jax.jit(self._first_of)
        self._work = jax.jit(partial(_work, method, g))
        self._score = jax.jit(partial(_score, method, g, self.shapes.state))
        self._finish = jax.jit(partial(_finish, method, g, self.shapes.state))

    def _first_of(self, i: jax.Array) -> PyTree:
        state = self.method.whole.init(stage_key(_key(self.method), INIT))
        return trees.row(state.clients[self.g], i)

    def first(self, i: int) -> PyTree:
        """Returns a client's state before the first round, which follows from the seed."""
        return jax.device_get(self._first(np.int32(i)))

    def work(self, payload: PyTree, client: PyTree, at: At) -> Answer:
        """Trains locally for one round."""
        return jax.device_get(self._work(payload, client, *at))

    def score(self, given: Any, payload: PyTree, client: PyTree, at: At) -> Evaluation:
        """Sums metrics over the client's examples, as a simulation does."""
        return jax.device_get(self._score(given, payload, client, *at))

    def personalize(self, given: Any, client: PyTree, at: At) -> PyTree:
        """Returns the variables of the client's own model."""
        return jax.device_get(self._finish(given, client, *at))


class AtServer:
    """Programs of the server; `data` gives shapes alone."""

    def __init__(self, method: Method, data: FederatedData, cohort: int) -> None:
        self.method, self.cohort = method, cohort
        data = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data)
        count = len(groups.group_algorithms(method.algorithm))
        self.shapes = tuple(shapes(method, g, data) for g in range(count))
        self.init = jax.jit(self._init)
        self.receive = jax.jit(method.whole.receive)
        plain = round_functions(method.algorithm, method.federation, cohort=cohort)
        self.seats = jax.jit(partial(plain.sample_slots, _key(method)))
        each = range(count)
        self.send = tuple(jax.jit(partial(_send, method, g)) for g in each)
        self.judge = tuple(jax.jit(partial(_judge, method, g)) for g in each)
        self.serve = tuple(
            jax.jit(partial(_serve, method, g, self.shapes[g].client, data)) for g in each
        )

    def _init(self) -> State:
        """Initialises the state without the clients' part, which clients build themselves."""
        return self.method.whole.init(stage_key(_key(self.method), INIT))._replace(clients=())

    def cohort_of(self, g: int, ids: Any, payloads: PyTree, uploads: PyTree, t: int) -> Cohort:
        """Builds a cohort as the simulation does: an absent client has an id out of range.

        Args:
          ids: those that arrived, by their seats; None in the others.
        """
        n = self.method.federation.clients
        arrived = np.array([i is not None for i in ids])
        safe = np.array([n if i is None else i for i in ids], np.int32)
        counts = np.append(self.method.federation.counts, 0).astype(np.float32)
        seats: Any = safe, arrived, counts[safe]  # NumPy's arrays, which compiled programs take
        ids_there, there, weights = seats
        return Cohort(ids_there, there, weights, payloads, uploads, np.int32(t))


def _key(method: Method) -> jax.Array:
    return jax.random.key(method.seed)


def _send(method: Method, g: int, state: State, i: jax.Array, t: jax.Array) -> PyTree:
    return method.member(g).send(
        state, ClientContext(i, None, t, stage_key(_key(method), SEND, t, i))
    )


def _work(
    method: Method,
    g: int,
    payload: PyTree,
    client: PyTree,
    i: jax.Array,
    t: jax.Array,
    data: FederatedData,
) -> Answer:
    ctx = ClientContext(i, client_data(data, 0), t, stage_key(_key(method), TRAIN, t, i))
    upload, variables, new, metrics = method.member(g).train(payload, client, ctx)
    return Answer(upload, metrics, trees.all_finite((upload, variables, new)), new)


def _judge(
    method: Method, g: int, payload: PyTree, upload: PyTree
) -> tuple[jax.Array, dict[str, Any], dict[str, Any]]:
    """Returns whether an upload is finite and not too large, and the bill of the visit.

    An upload is too large if its change has no finite norm in float32: nothing could be computed
    of what it makes of the server's state.
    """
    moved = trees.squared_norm(trees.change(payload, upload))
    fine = trees.all_finite(upload) & jnp.isfinite(moved)
    if method.max_update_norm is not None:
        fine &= moved <= jnp.square(jnp.float32(method.max_update_norm))
    bill = method.member(g).traffic(payload, upload)
    down, up = (jax.tree.map(jnp.int32, part) for part in bill)
    return fine, down, up


def _serve(
    method: Method, g: int, client: PyTree, data: Any, state: State, i: jax.Array, t: jax.Array
) -> list[Any]:
    ctx = _visit(method, data, i, t)
    return served.serve(method.member(g).personalize, state, client, ctx)


def _finish(
    method: Method,
    g: int,
    state: State,
    given: Any,
    client: PyTree,
    i: jax.Array,
    t: jax.Array,
    data: FederatedData,
) -> PyTree:
    ctx = _visit(method, data, i, t)
    return served.finish(method.member(g).personalize, given, state, client, ctx)


def _visit(method: Method, data: Any, i: jax.Array, t: jax.Array) -> ClientContext:
    """Returns the visit of an evaluation; the examples may be shapes."""
    known = not isinstance(jax.tree.leaves(data)[0], jax.ShapeDtypeStruct)
    own = client_data(data, 0) if known else jax.eval_shape(client_data, data, _NUMBER)
    return ClientContext(i, own, t, stage_key(_key(method), PERSONAL, t, i))


def _score(
    method: Method,
    g: int,
    state: State,
    given: Any,
    payload: PyTree,
    client: PyTree,
    i: jax.Array,
    t: jax.Array,
    data: FederatedData,
) -> Evaluation:
    """Scores one client as the simulation does, given the server's part of its model."""
    member = method.member(g)
    own = client_data(data, 0)
    test = Split(data.test.rows[0], data.test.size[0])

    def score(variables: PyTree, split: Split) -> local_training.Scores:
        return local_training.evaluate(
            member.predict, variables, own, split, method.federation.task
        )

    model = _finish(method, g, state, given, client, i, t, data)
    before, validation = score(model, test), score(model, own.validation)
    if not method.after:
        return Evaluation(before, validation, None)
    ctx = ClientContext(i, own, t, stage_key(_key(method), TRAIN, t, i))
    _, trained, _, _ = member.train(payload, client, ctx)
    if method.validate_after:
        validation = score(trained, own.validation)
    return Evaluation(before, validation, score(trained, test))


def single(data: FederatedData, i: int) -> FederatedData:
    """Returns one client's examples alone.

    All clients get the same shapes, so that on one machine they share compiled programs.
    """
    splits = (data.train, data.validation, data.test)

    def held(j: int) -> np.ndarray:
        own = [np.asarray(split.rows[j])[: int(split.size[j])] for split in splits]
        return np.unique(np.concatenate(own))

    mine = held(i)
    most = max(len(held(j)) for j in range(len(data.train.size)))

    def table(split: Split) -> Split:
        rows, size = np.asarray(split.rows[i]), int(split.size[i])
        there = np.arange(len(rows)) < size
        found: Any = np.where(there, np.searchsorted(mine, rows), 0).astype(np.int32)[None]
        count: Any = np.array([size], np.int32)
        return Split(found, count)

    def examples(whole: Any) -> Any:
        own = np.asarray(whole)[mine]
        return np.pad(own, [(0, most - len(own)), *[(0, 0)] * (own.ndim - 1)])

    def row(stack: Any) -> Any:
        return None if stack is None else np.asarray(stack)[i : i + 1]

    return data._replace(
        x=examples(data.x),
        y=examples(data.y),
        train=table(data.train),
        validation=table(data.validation),
        test=table(data.test),
        label_map=row(data.label_map),
        classes=row(data.classes),
    )
