"""Rounds of the methods that store clients' factors and mix them: Factorized-FL and its variant."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.factorized_fl.pruning import bytes_used, prune, share_pruned, with_l1
from fedjax_pfl.algorithms.shared.initial_state import initial_momentum, initial_variables
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.algorithms.shared.split_model import SplitClient
from fedjax_pfl.core import local_training, offload, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
)
from fedjax_pfl.core.errors import require
from fedjax_pfl.networks.factorized import Factorized


class Matching(NamedTuple):
    """Decides whose factors a client mixes.

    Rows are {"params": the latest uploads, leaves [N, ...]}, and further arrays of the method.
    """

    compared: str  # the layer whose v the server compares
    weights: Callable[[PyTree, Any, jax.Array], jax.Array]  # (rows, client id, key) -> ω [N]
    first: Callable[[PyTree], PyTree]  # (stacked initial uploads) -> rows before the first round
    updated: Callable[[PyTree, Cohort], PyTree]  # (rows, cohort) -> new rows of the cohort
    observe: Callable[[PyTree], dict[str, jax.Array]]  # rows -> arrays to record, by name


class Penalty(NamedTuple):
    """Penalty on μ, and which entries of μ are pruned."""

    gradient: float  # λ in the gradient of λ ‖μ‖₁
    least: float  # entries with a smaller magnitude are 0 in evaluation and traffic
    pruned_travel: bool = False  # prune μ before download and upload too


def body_layers(net: Factorized) -> list[str]:
    """Returns the factorised layers before the head, in order; raises UsageError if none."""
    layers = [name for name in net.factorized if name != net.head]
    require(layers, "this method mixes the factors of layers before the last, and there are none")
    return layers


def stacked_leaf(models: PyTree, layer: str, leaf: str) -> jax.Array:
    """Returns one leaf of K stacked models, such as "v" of layer "fc1", flattened to [K, D]."""
    part = models["params"]
    for word in layer.split("/"):
        part = part[word]
    return offload.map_clients(jnp.ravel, part[leaf])


def factor_mixing(
    net: Factorized,
    training: local_training.Training,
    federation: Federation,
    matching: Matching,
    penalty: Penalty,
    is_mixed: Callable[[str, str], bool],
) -> Algorithm:
    """Builds a method whose clients download a weighted mean of all clients' stored factors.

    The rows are the latest uploads, leaves of shape [N, ...]; clients store `SplitClient`.

    Args:
      net: The factorised network.
      training: Local training.
      federation: The clients.
      matching: Decides whose factors a client mixes.
      penalty: Penalty on μ, and pruning.
      is_mixed: (layer name, leaf name) -> True if the parameter is mixed. The others stay on the
        client; changes of v of the compared layer are uploaded too.
    """
    task = federation.task
    n = federation.clients

    def is_copied(layer: str, leaf: str) -> bool:
        """Returns True for v of the compared layer if it is not mixed: the server has a copy."""
        return (layer, leaf) == (matching.compared, "v") and not is_mixed(layer, leaf)

    def is_uploaded(layer: str, leaf: str) -> bool:
        return is_mixed(layer, leaf) or is_copied(layer, leaf)

    def sent(params: PyTree) -> PyTree:
        return prune(params, penalty.least) if penalty.pruned_travel else params

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = initial_variables(net, federation, key, None)
        params, model_state = local_training.split_variables(variables)
        uploaded = trees.divide({"params": params}, is_uploaded)[0]
        personal = trees.divide({"params": params}, is_mixed)[1]
        rows = matching.first(trees.repeat(uploaded, n))
        momentum = initial_momentum(training, params, federation)
        personal = trees.repeat({**personal, **model_state}, n)
        if start is None:
            return State((), rows, SplitClient(personal, momentum))
        existing = start.clients.personal if isinstance(start.clients, SplitClient) else None
        matches = trees.same_shapes((start.rows, existing), (rows, personal))
        require(matches, "a phase of this method can only start from one with the same settings")
        return State((), start.rows, SplitClient(existing, momentum))

    def send(state: State, ctx: ClientContext) -> PyTree:
        stored = {"params": state.rows["params"]}
        mixed = offload.weighted_sum(stored, matching.weights(state.rows, ctx.i, ctx.key))
        mixed = {"params": sent(trees.divide(mixed, is_mixed)[0]["params"])}
        return trees.join(mixed, trees.divide(trees.row(stored, ctx.i), is_copied)[0])

    def train(payload: PyTree, client: SplitClient, ctx: ClientContext) -> ClientResult:
        mixed, stored_v = trees.divide(payload, is_mixed)
        variables = trees.join(mixed, client.personal)
        gradient = with_l1(local_training.gradient(net, task, ctx.data), penalty.gradient)
        variables, momentum, metrics = fit_variables(
            training, gradient, variables, client.momentum, ctx
        )
        params, model_state = local_training.split_variables(variables)
        new_mixed, personal = trees.divide({"params": params}, is_mixed)
        old_v, new_v = (trees.divide(tree, is_copied)[0] for tree in (client.personal, personal))
        new_mixed = {"params": sent(new_mixed["params"])}
        upload = trees.join(new_mixed, trees.add_change(stored_v, old_v, new_v))
        personal = {**personal, **model_state}
        return ClientResult(
            upload=upload,
            variables={"params": prune(params, penalty.least), **model_state},
            client=SplitClient(personal, momentum),
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, cohort.put(state.rows, matching.updated(state.rows, cohort))

    def personalize(state: State, client: SplitClient, ctx: ClientContext) -> PyTree:
        variables = trees.join(trees.divide(send(state, ctx), is_mixed)[0], client.personal)
        return {**variables, "params": prune(variables["params"], penalty.least)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Counts mixed parameters in both directions, and the upload of v of the compared layer.

        If v is not mixed, the payload has the server's copy of the client's v, to which the client
        adds the change of its own; that needs no download.
        """
        down = trees.divide(payload, is_mixed)[0]
        return Traffic(*(bytes_used(prune(tree, penalty.least)) for tree in (down, upload)))

    def observe(state: State) -> dict[str, jax.Array]:
        recorded = matching.observe(state.rows)
        if net.bias:
            stored = (state.rows["params"], state.clients.personal)
            recorded["zeros_in_mu"] = share_pruned(stored, penalty.least)
        return recorded

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=net.apply,
        traffic=traffic,
        observe=observe,
        offload=("params",),
    )
