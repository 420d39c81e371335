"""Evaluation: scores of each client's personal model, and after one more local training."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import jaxprs, local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, PyTree, State
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data
from fedjax_pfl.core.randomness import PERSONAL, SEND, TRAIN, stage_key
from fedjax_pfl.core.task import Task
from fedjax_pfl.simulation.map_clients import map_clients
from fedjax_pfl.simulation.records import CohortBatch, Evaluation, RoundSpec, SharedInputs, Slots

Item = tuple[Any, Any, PyTree]  # client id, its index in the data, client-side state


def evaluate_clients(
    spec: RoundSpec, key: jax.Array, state: State, data: FederatedData, t: jax.Array
) -> Evaluation:
    """Scores all clients, or those of `spec.evaluated_ids`; the others have zeros. Arrays are [N].

    Sums over groups, because a client has scores in its own group only. `state.clients` is a tuple
    with the client-side state [N, ...] of each group.
    """
    n, evaluated_ids = spec.federation.clients, spec.evaluated_ids
    ids = (
        jnp.arange(n, dtype=jnp.int32)
        if evaluated_ids is None
        else jnp.asarray(evaluated_ids, jnp.int32)
    )

    def score_group(g: int) -> Evaluation:
        in_group, clients = jnp.asarray(spec.membership[g]), state.clients[g]
        in_group = in_group if evaluated_ids is None else in_group[ids]
        if spec.is_spread:
            return _score_spread(
                spec, g, SharedInputs(key=key, state=state, data=data, t=t), ids, in_group
            )
        clients = clients if evaluated_ids is None else trees.row(clients, ids)
        batch = CohortBatch(slots=Slots(ids, in_group), places=ids, data=data, clients=clients)
        return score_cohort(spec, g, key, state._replace(clients=()), batch, t)

    total, *other_groups = map(score_group, range(len(spec.members)))
    for scores in other_groups:
        total = jax.tree.map(jnp.add, total, scores)
    if evaluated_ids is None:
        return total
    return jax.tree.map(lambda a: jnp.zeros((n, *a.shape[1:]), a.dtype).at[ids].set(a), total)


def score_cohort(
    spec: RoundSpec, g: int, key: jax.Array, state: State, batch: CohortBatch, t: Any
) -> Evaluation:
    """Scores the K clients of a batch, which belong to group `g`. Returns arrays [K].

    Empty slots have zeros. The `state` has no clients.
    """
    ids, present = batch.slots
    member = spec.members[g]
    shared, items = (
        SharedInputs(key=key, state=state, data=batch.data, t=t),
        (ids, batch.places, batch.clients),
    )
    if not jax.tree.leaves(state.rows) or _reads_examples(member, shared, items):

        def score(shared: SharedInputs, item: Item) -> Evaluation:
            return _scores(spec, member, shared, item, _served(spec, member, shared, item))

        scores = map_clients(score, shared, items, present, spec.chunk, spec.mesh)
        return trees.zero_unless(present, scores)

    def score_served(
        shared: SharedInputs, item_and_served: tuple[Item, tuple[PyTree, PyTree]]
    ) -> Evaluation:
        return _scores(spec, member, shared, *item_and_served)

    # Methods that mix models read the rows of all clients once for many clients.
    scores = map_clients(
        score_served,
        shared._replace(state=None),
        items,
        present,
        spec.chunk,
        spec.mesh,
        partial(_served, spec, member),
        shared,
    )
    return trees.zero_unless(present, scores)


def _score_spread(
    spec: RoundSpec, g: int, shared: SharedInputs, ids: jax.Array, present: jax.Array
) -> Evaluation:
    """Like `score_cohort`, for clients `ids` [K] whose state is spread over devices.

    The state in `shared` has all clients; `present` [K] is False for clients of other groups.
    """
    member, state = spec.members[g], shared.state
    has_rows = bool(jax.tree.leaves(state.rows))
    server_inputs = shared._replace(state=state._replace(clients=()))

    def read_rows(state: State, i: jax.Array) -> tuple[PyTree, Any]:
        """Returns the client's state and, if models depend on rows, its model and payload."""
        client = trees.row(state.clients[g], i)
        if not has_rows:
            return client, None
        inputs = shared._replace(state=state._replace(clients=()))
        return client, _served(spec, member, inputs, (i, i, client))

    def score(shared: SharedInputs, inputs: tuple[jax.Array, tuple[PyTree, Any]]) -> Evaluation:
        i, (client, served) = inputs
        item = (i, i, client)
        served = served if has_rows else _served(spec, member, shared, item)
        return _scores(spec, member, shared, item, served)

    is_tuned = _reads_examples(member, server_inputs, (ids, ids, state.clients[g]))
    scores = map_clients(
        score,
        shared._replace(state=None) if has_rows else server_inputs,
        ids,
        present,
        spec.chunk,
        spec.mesh,
        read_rows,
        state,
        block=spec.chunk if is_tuned else None,
        is_spread=True,
    )
    return trees.zero_unless(present, scores)


def _reads_examples(member: Algorithm, shared: SharedInputs, items: Item) -> bool:
    """Returns True if personalised models depend on examples, as after fine-tuning.

    Args:
      member: Algorithm of the clients' group.
      shared: Inputs that all clients share, with a state without clients.
      items: Ids, indices in the data and client-side states, leaves [K, ...].
    """

    def model(data: FederatedData, shared: SharedInputs, items: Item) -> PyTree:
        return _model(member, shared._replace(data=data), trees.row(items, 0))

    return jaxprs.depends_on(model, shared.data, shared._replace(data=None), items)


def _served(
    spec: RoundSpec, member: Algorithm, shared: SharedInputs, item: Item
) -> tuple[PyTree, PyTree]:
    """Returns a client's personalised model, and its download for one more local training.

    The download is None if models are not evaluated after local training. `member` is the algorithm
    of the client's group.
    """
    key, state, _, t = shared
    model = _model(member, shared, item)
    if not spec.evaluate_after:
        return model, None
    i = item[0]
    return model, member.send(
        state, ClientContext(i=i, data=None, t=t, key=stage_key(key, SEND, t, i))
    )


def _model(member: Algorithm, shared: SharedInputs, item: Item) -> PyTree:
    """Returns a client's personalised model; arguments are those of `_served`."""
    (key, state, data, t), (i, place, client) = shared, item
    ctx = ClientContext(i=i, data=client_data(data, place), t=t, key=stage_key(key, PERSONAL, t, i))
    return member.personalize(state, client, ctx)


def _scores(
    spec: RoundSpec,
    member: Algorithm,
    shared: SharedInputs,
    item: Item,
    model_and_payload: tuple[PyTree, PyTree],
) -> Evaluation:
    """Scores one client; `model_and_payload` is the result of `_served`."""
    (key, _, data, t), (i, place, client) = shared, item
    model, payload = model_and_payload
    examples = client_data(data, place)
    test = Split(data.test.rows[place], data.test.size[place])
    score = partial(_score, spec.federation.task, member, examples)
    score_test = partial(score, split=test, count_confusion=spec.count_confusion)
    before, validation = score_test(model), score(model, examples.validation)
    if not spec.evaluate_after:
        return Evaluation(before=before, validation=validation, after=None)
    ctx = ClientContext(i=i, data=examples, t=t, key=stage_key(key, TRAIN, t, i))
    _, trained_model, _, _ = member.train(payload, client, ctx)
    if spec.validate_after:
        validation = score(trained_model, examples.validation)
    return Evaluation(before=before, validation=validation, after=score_test(trained_model))


def _score(
    task: Task,
    member: Algorithm,
    data: ClientData,
    variables: PyTree,
    split: Split,
    count_confusion: bool = False,
) -> local_training.Scores:
    """Returns sums of scores over a split of one client's examples.

    Args:
      task: Loss and metrics.
      member: Algorithm of the client's group.
      data: Examples of the client.
      variables: Variables of the model to score.
      split: The split.
      count_confusion: Whether to count the confusion matrix.
    """
    return local_training.evaluate(
        member.predict, variables, data, split, task, count_confusion=count_confusion
    )
