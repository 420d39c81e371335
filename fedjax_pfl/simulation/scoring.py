"""An evaluation: each client as it is served now, and after one more local training."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, PyTree, State, Visit
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data
from fedjax_pfl.core.randomness import PERSONAL, SEND, TRAIN, stage_key
from fedjax_pfl.core.task import Task
from fedjax_pfl.simulation.map_clients import map_clients
from fedjax_pfl.simulation.records import Evaluation, How, Party, Seats, Shared

Item = tuple[Any, Any, PyTree]  # a client's id, its place in the data, and what stays with it


def evaluation(
    how: How, key: jax.Array, state: State, data: FederatedData, t: jax.Array
) -> Evaluation:
    """The sum over groups: a client has scores in its own only. `state.clients` is a tuple."""
    n, some = how.federation.clients, how.evaluated
    ids = jnp.arange(n, dtype=jnp.int32) if some is None else jnp.asarray(some, jnp.int32)

    def group(g: int) -> Evaluation:
        own, clients = jnp.asarray(how.membership[g]), state.clients[g]
        own = own if some is None else own[ids]
        if how.spread:
            return _score_spread(how, g, Shared(key, state, data, t), ids, own)
        clients = clients if some is None else trees.row(clients, ids)
        party = Party(Seats(ids, own), ids, data, clients)
        return score_party(how, g, key, state._replace(clients=()), party, t)

    first, *others = map(group, range(len(how.members)))
    for scores in others:
        first = jax.tree.map(jnp.add, first, scores)
    if some is None:
        return first
    return jax.tree.map(lambda a: jnp.zeros((n, *a.shape[1:]), a.dtype).at[ids].set(a), first)


def score_party(how: How, g: int, key: jax.Array, state: State, party: Party, t: Any) -> Evaluation:
    """Those of a group, [K]; zeros where a seat is empty."""
    (ids, own), places, data, clients = party
    member = how.members[g]

    def work(shared: Shared, item: Item) -> Evaluation:
        return _scores(how, member, shared, item, _served(how, member, shared, item))

    items = (ids, places, clients)
    scores = map_clients(work, Shared(key, state, data, t), items, own, how.chunk, how.mesh)
    return _of_those(own, scores)


def _score_spread(how: How, g: int, shared: Shared, ids: jax.Array, own: jax.Array) -> Evaluation:
    """As `score_party`, of clients that are spread over devices with all of `shared.state`."""
    member, state = how.members[g], shared.state
    seen = state._replace(clients=())
    reads = bool(jax.tree.leaves(state.rows))

    def before(i: jax.Array) -> tuple[PyTree, Any]:
        """What is read of all clients; models, too, where they are made of that."""
        client = trees.row(state.clients[g], i)
        if not reads:
            return client, None
        return client, _served(how, member, shared._replace(state=seen), (i, i, client))

    def work(shared: Shared, known: tuple[jax.Array, tuple[PyTree, Any]]) -> Evaluation:
        i, (client, served) = known
        item = (i, i, client)
        served = served if reads else _served(how, member, shared, item)
        return _scores(how, member, shared, item, served)

    rest = shared._replace(state=None if reads else seen)
    return _of_those(own, map_clients(work, rest, ids, own, how.chunk, how.mesh, before))


def _of_those(own: jax.Array, scores: Evaluation) -> Evaluation:
    return trees.where(own, scores, jax.tree.map(jnp.zeros_like, scores))


def _served(how: How, member: Algorithm, shared: Shared, item: Item) -> tuple[PyTree, PyTree]:
    """One client's model, and what it would download to train once more."""
    (key, state, data, t), (i, place, client) = shared, item
    visit = Visit(i, client_data(data, place), t, stage_key(key, PERSONAL, t, i))
    served = member.personal(state, client, visit)
    if not how.after:
        return served, None
    return served, member.send(state, Visit(i, None, t, stage_key(key, SEND, t, i)))


def _scores(
    how: How, member: Algorithm, shared: Shared, item: Item, made: tuple[PyTree, PyTree]
) -> Evaluation:
    """One client's."""
    (key, _, data, t), (i, place, client), (served, payload) = shared, item, made
    own = client_data(data, place)
    test = Split(data.test.rows[place], data.test.size[place])
    score = partial(_score, how.federation.task, member, own)
    before, validation = score(served, test), score(served, own.validation)
    if not how.after:
        return Evaluation(before, validation, None)
    visit = Visit(i, own, t, stage_key(key, TRAIN, t, i))
    _, trained, _, _ = member.train(payload, client, visit)
    if how.validate_after:
        validation = score(trained, own.validation)
    return Evaluation(before, validation, score(trained, test))


def _score(
    task: Task, member: Algorithm, data: ClientData, variables: PyTree, split: Split
) -> local_training.Scores:
    return local_training.evaluate(member.predict, variables, data, split, task)
