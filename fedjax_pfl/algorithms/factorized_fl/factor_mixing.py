"""Rounds of the methods that store clients' factors and mix them: Factorized-FL and its variant."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.factorized_fl.pruning import bytes_used, prune, share_pruned, with_l1
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.split_model import Client
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
    """Decides whose factors a client mixes. Rows are {"params": the latest uploads, ...}."""

    compared: str  # the layer whose v the server compares
    weights: Callable[[PyTree, Any, jax.Array], jax.Array]  # (rows, client, key) -> ω, [N]
    first: Callable[[PyTree], PyTree]  # (stacked initial uploads) -> rows before the first round
    updated: Callable[[PyTree, Cohort], PyTree]  # (rows, cohort) -> new rows of the cohort
    observe: Callable[[PyTree], dict[str, jax.Array]]  # (rows) -> what a run records


class Penalty(NamedTuple):
    """What keeps μ sparse."""

    gradient: float  # λ in the gradient of λ ‖μ‖₁
    least: float  # smaller entries are pruned for evaluation and for the bill
    pruned_travel: bool = False  # they are pruned before they travel too


def body_layers(net: Factorized) -> list[str]:
    """Returns the factorised layers before the head, from the input to the output."""
    layers = [name for name in net.factorized if name != net.head]
    require(layers, "this method mixes the factors of layers before the last, and there are none")
    return layers


def stacked_leaf(models: PyTree, layer: str, leaf: str) -> jax.Array:
    """Returns one leaf of K stacked models, flattened to [K, D]."""
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
    """Builds a method that mixes stored factors. Rows: uploads, [N, ...]. Clients: `Client`.

    Args:
      is_mixed: tells by layer and leaf which parameters clients share. The rest stays with the
        client, except that the server needs v of the compared layer.
    """
    task = federation.task
    n = federation.clients

    def is_compared(layer: str, leaf: str) -> bool:
        return (layer, leaf) == (matching.compared, "v")

    def travels(layer: str, leaf: str) -> bool:
        return is_mixed(layer, leaf) or is_compared(layer, leaf)

    def sent(params: PyTree) -> PyTree:
        return prune(params, penalty.least) if penalty.pruned_travel else params

    def init(key: jax.Array, start: State | None = None) -> State:
        params, rest = local_training.split_variables(common.initial(net, federation, key, None))
        uploaded, own = trees.divide({"params": params}, travels)
        rows = matching.first(trees.repeat(uploaded, n))
        momentum = common.kept(training, params, federation)
        stays = Client(trees.repeat({**own, **rest}, n), momentum)
        if start is None:
            return State((), rows, stays)
        kept = start.clients.own if isinstance(start.clients, Client) else None
        same = trees.same_shapes((start.rows, kept), (rows, stays.own))
        require(same, "this method can only continue its own factors, of the same settings")
        return State((), start.rows, Client(kept, momentum))

    def send(state: State, ctx: ClientContext) -> PyTree:
        stored = {"params": state.rows["params"]}
        mixed = offload.weighted_sum(stored, matching.weights(state.rows, ctx.i, ctx.key))
        mixed = {"params": sent(trees.divide(mixed, is_mixed)[0]["params"])}
        if is_mixed(matching.compared, "v"):
            return mixed
        return trees.join(mixed, trees.divide(trees.row(stored, ctx.i), is_compared)[0])

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        params, rest = local_training.split_variables(trees.join(payload, client.own))
        gradient = with_l1(local_training.gradient(net, task, ctx.data), penalty.gradient)
        params, rest, momentum, metrics = local_training.fit(
            training, gradient, params, rest, client.momentum, ctx
        )
        upload, _ = trees.divide({"params": sent(params)}, travels)
        own = {**trees.divide({"params": params}, travels)[1], **rest}
        variables = {"params": prune(params, penalty.least), **rest}
        return ClientResult(upload, variables, Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return state.server, cohort.put(state.rows, matching.updated(state.rows, cohort))

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        variables = trees.join(send(state, ctx), client.own)
        return {**variables, "params": prune(variables["params"], penalty.least)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Bills what is mixed, both ways, and v of the compared layer on its way up.

        If v is not mixed, the payload returns the client's own last upload, which is free.
        """
        down = trees.divide(payload, is_mixed)[0]
        return Traffic(*(bytes_used(prune(tree, penalty.least)) for tree in (down, upload)))

    def observe(state: State) -> dict[str, jax.Array]:
        recorded = matching.observe(state.rows)
        if net.bias:
            stored = (state.rows["params"], state.clients.own)
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
