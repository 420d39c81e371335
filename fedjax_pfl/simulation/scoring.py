"""An evaluation: each client as it is served now, and after one more local training."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, PyTree, State
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data
from fedjax_pfl.core.randomness import PERSONAL, SEND, TRAIN, stage_key
from fedjax_pfl.core.task import Task
from fedjax_pfl.simulation.map_clients import map_clients
from fedjax_pfl.simulation.records import CohortBatch, Evaluation, RoundSpec, SharedInputs, Slots

Item = tuple[Any, Any, PyTree]  # a client's id, its place in the data, and what stays with it


def evaluation(
    spec: RoundSpec, key: jax.Array, state: State, data: FederatedData, t: jax.Array
) -> Evaluation:
    """The sum over groups: a client has scores in its own only. `state.clients` is a tuple."""
    n, some = spec.federation.clients, spec.evaluated
    ids = jnp.arange(n, dtype=jnp.int32) if some is None else jnp.asarray(some, jnp.int32)

    def group(g: int) -> Evaluation:
        own, clients = jnp.asarray(spec.membership[g]), state.clients[g]
        own = own if some is None else own[ids]
        if spec.spread:
            return _score_spread(spec, g, SharedInputs(key, state, data, t), ids, own)
        clients = clients if some is None else trees.row(clients, ids)
        cohort_batch = CohortBatch(Slots(ids, own), ids, data, clients)
        return score_party(spec, g, key, state._replace(clients=()), cohort_batch, t)

    first, *others = map(group, range(len(spec.members)))
    for scores in others:
        first = jax.tree.map(jnp.add, first, scores)
    if some is None:
        return first
    return jax.tree.map(lambda a: jnp.zeros((n, *a.shape[1:]), a.dtype).at[ids].set(a), first)


def score_party(
    spec: RoundSpec, g: int, key: jax.Array, state: State, cohort_batch: CohortBatch, t: Any
) -> Evaluation:
    """Those of a group, [K]; zeros where a seat is empty."""
    (ids, own), places, data, clients = cohort_batch
    member = spec.members[g]

    def work(shared: SharedInputs, item: Item) -> Evaluation:
        return _scores(spec, member, shared, item, _served(spec, member, shared, item))

    items = (ids, places, clients)
    scores = map_clients(work, SharedInputs(key, state, data, t), items, own, spec.chunk, spec.mesh)
    return _of_those(own, scores)


def _score_spread(
    spec: RoundSpec, g: int, shared: SharedInputs, ids: jax.Array, own: jax.Array
) -> Evaluation:
    """As `score_party`, of clients that are spread over devices with all of `shared.state`."""
    member, state = spec.members[g], shared.state
    seen = state._replace(clients=())
    reads = bool(jax.tree.leaves(state.rows))

    def before(i: jax.Array) -> tuple[PyTree, Any]:
        """What is read of all clients; models, too, where they are made of that."""
        client = trees.row(state.clients[g], i)
        if not reads:
            return client, None
        return client, _served(spec, member, shared._replace(state=seen), (i, i, client))

    def work(shared: SharedInputs, known: tuple[jax.Array, tuple[PyTree, Any]]) -> Evaluation:
        i, (client, served) = known
        item = (i, i, client)
        served = served if reads else _served(spec, member, shared, item)
        return _scores(spec, member, shared, item, served)

    rest = shared._replace(state=None if reads else seen)
    return _of_those(own, map_clients(work, rest, ids, own, spec.chunk, spec.mesh, before))


def _of_those(own: jax.Array, scores: Evaluation) -> Evaluation:
    return trees.where(own, scores, jax.tree.map(jnp.zeros_like, scores))


def _served(
    spec: RoundSpec, member: Algorithm, shared: SharedInputs, item: Item
) -> tuple[PyTree, PyTree]:
    """One client's model, and what it would download to train once more."""
    (key, state, data, t), (i, place, client) = shared, item
    ctx = ClientContext(i, client_data(data, place), t, stage_key(key, PERSONAL, t, i))
    served = member.personalize(state, client, ctx)
    if not spec.after:
        return served, None
    return served, member.send(state, ClientContext(i, None, t, stage_key(key, SEND, t, i)))


def _scores(
    spec: RoundSpec,
    member: Algorithm,
    shared: SharedInputs,
    item: Item,
    made: tuple[PyTree, PyTree],
) -> Evaluation:
    """One client's."""
    (key, _, data, t), (i, place, client), (served, payload) = shared, item, made
    own = client_data(data, place)
    test = Split(data.test.rows[place], data.test.size[place])
    score = partial(_score, spec.federation.task, member, own)
    before, validation = score(served, test), score(served, own.validation)
    if not spec.after:
        return Evaluation(before, validation, None)
    ctx = ClientContext(i, own, t, stage_key(key, TRAIN, t, i))
    _, trained, _, _ = member.train(payload, client, ctx)
    if spec.validate_after:
        validation = score(trained, own.validation)
    return Evaluation(before, validation, score(trained, test))


def _score(
    task: Task, member: Algorithm, data: ClientData, variables: PyTree, split: Split
) -> local_training.Scores:
    return local_training.evaluate(member.predict, variables, data, split, task)
