"""pFedLA and HeurpFedLA: the server mixes each client's model layer by layer.

Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, 2022. With θ_j the
stored model of client j, ψ_i the hypernetwork of client i (its embedding v_i included) and
α_i = HN(ψ_i) of shape [L, N]:

  θ̄_i^l = Σ_j α_i^{l,j} θ_j^l                             (6), all from one snapshot
  θ_i    = local training from θ̄_i, Δθ_i = θ_i − θ̄_i      (Algorithm 1)
  ψ_i   ← ψ_i + η (∂θ̄_i/∂ψ_i)ᵀ Δθ_i                       (10), (11)

With step="scaled" a layer's Δθ_i^l is divided by its squared norm first, so that η has no unit.
The paper leaves α's normalisation, the sizes and η open; its public re-implementations take
relu(x)/Σ, the plain step and η = .005, with which α stays uniform for hundreds of rounds.

HeurpFedLA (12): in every round the k layers with the largest α_i^{l,i} stay θ_i^l; they do not come
down and give the hypernetwork no gradient.

Deviations: the step goes towards the trained model; both public implementations go the other way.
BatchNorm's statistics stay with the clients, its scale and shift are a layer like any other.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
    Trained,
    Visit,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks.layer_weights import NORMALISE, LayerWeights, alpha


class Rows(NamedTuple):
    """What the server keeps for each client."""

    theta: PyTree  # its parameters as it last uploaded them
    psi: PyTree  # its hypernetwork's parameters


class Client(NamedTuple):
    """What stays with each client."""

    rest: PyTree  # BatchNorm statistics
    momentum: PyTree


def mix(theta: PyTree, weights: jax.Array, layer_of: PyTree) -> PyTree:
    """θ̄^l = Σ_j α^{l,j} θ_j^l: stacked parameters [N, ...], weights [L, N], a layer per leaf."""
    return jax.tree.map(
        lambda leaf, layer: jnp.tensordot(weights[layer], leaf, 1, precision="highest"),
        theta,
        layer_of,
    )


def scaled(delta: PyTree, layer_of: PyTree, layers: int) -> PyTree:
    """Δ^l / ‖Δ^l‖², zero where Δ^l is."""
    squares = jnp.zeros(layers)
    for leaf, layer in zip(jax.tree.leaves(delta), jax.tree.leaves(layer_of), strict=True):
        squares = squares.at[layer].add(jnp.sum(leaf**2))
    factor = jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1.0), 0.0)
    return jax.tree.map(lambda leaf, layer: leaf * factor[layer], delta, layer_of)


def pfedla(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    k: int = 0,
    granularity: str = "layer",
    normalise: str = "softmax",
    step: str = "scaled",
    rate: float = 0.05,
    embedding: int = 100,
    hidden: int = 100,
    depth: int = 3,
) -> Algorithm:
    """Layer-wise mixing by a hypernetwork per client.

    Args:
      k: layers that each client retains (HeurpFedLA); 0 is pFedLA.
      granularity: layer, or model: one weight per client for its whole model.
      normalise: how weights become shares α: softmax, or relu for relu(x)/Σ.
      step: scaled, each layer's change divided by its squared norm; or plain.
      rate: η of the hypernetworks' SGD.
      embedding: length of each hypernetwork's embedding.
      hidden: outputs of each of its hidden layers.
      depth: how many of those there are.
    """
    n = federation.clients
    variables = jax.eval_shape(lambda: common.initial(model, federation, jax.random.key(0), None))
    bytes_of = trees.bytes_per_layer(variables["params"])
    number = {name: j if granularity == "layer" else 0 for j, name in enumerate(bytes_of)}
    layers = max(number.values()) + 1
    _check(k, granularity, normalise, step, rate, layers, federation)
    layer_of = trees.map_layers(lambda name, leaf: number[name], variables["params"])
    from_input = [number[name] for name in model.layers if name in number] if k else range(layers)
    places = jnp.asarray(list(dict.fromkeys(from_input)))
    sgd = common.trainer(model, task, training)
    network = LayerWeights(n, layers, embedding, hidden, depth, normalise)

    def weights(psi: PyTree, i: Any) -> jax.Array:
        """α_i: [L, N]. Novel clients weigh nothing for others, and something for themselves."""
        allowed = jnp.asarray(federation.active) | (jnp.arange(n) == i)
        raw = jnp.asarray(network.apply({"params": psi}))
        return alpha(raw, i, allowed, normalise)

    def retained(psi: PyTree, i: Any) -> jax.Array:
        """Bool [L]: the k layers with the largest weight on the client's own.

        Of equal ones the earlier in the model, which is not the order of the parameter tree.
        """
        own = weights(psi, i)[places, i]
        rank = jnp.argsort(jnp.argsort(-own, stable=True))
        return jnp.zeros(layers, bool).at[places].set(rank < k)

    def served(psi: PyTree, theta: PyTree, i: Any, kept: jax.Array) -> PyTree:
        """θ̄_i: mixed, but for the retained layers."""
        own = jax.nn.one_hot(i, n)
        return mix(theta, jnp.where(kept[:, None], own, weights(psi, i)), layer_of)

    def init(key: jax.Array, start: State | None = None) -> State:
        first = common.initial(model, federation, key, start)
        params, rest = local_training.split_variables(first)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))
        psi = jax.vmap(lambda one: network.init(one)["params"])(keys)
        stays = Client(trees.repeat(rest, n), common.kept(training, params, federation))
        return State((), Rows(trees.repeat(params, n), psi), stays)

    def send(state: State, visit: Visit) -> PyTree:
        psi = trees.row(state.rows.psi, visit.i)
        kept = retained(psi, visit.i)
        return {"params": served(psi, state.rows.theta, visit.i, kept), "retained": kept}

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        variables = {"params": payload["params"], **client.rest}
        trained, momentum, metrics = sgd(variables, client.momentum, visit)
        params, rest = local_training.split_variables(trained)
        return Trained({"params": params}, trained, Client(rest, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, Rows]:
        rows = state.rows

        def learn(i: jax.Array, payload: PyTree, upload: PyTree) -> PyTree:
            psi = trees.row(rows.psi, i)
            delta = jax.tree.map(jnp.subtract, upload["params"], payload["params"])
            if step == "scaled":
                delta = scaled(delta, layer_of, layers)
            mixed = partial(served, theta=rows.theta, i=i, kept=payload["retained"])
            (direction,) = jax.vjp(mixed, psi)[1](delta)
            return jax.tree.map(lambda p, d: p + rate * d, psi, direction)

        psi = jax.vmap(learn)(cohort.ids, cohort.payloads, cohort.uploads)
        theta = cohort.put(rows.theta, cohort.uploads["params"])
        return state.server, Rows(theta, cohort.put(rows.psi, psi))

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        return {"params": send(state, visit)["params"], **client.rest}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        stays = payload["retained"]
        down = {name: jnp.where(stays[number[name]], 0, b) for name, b in bytes_of.items()}
        return Traffic(down, dict(bytes_of))

    def observe(state: State) -> dict[str, jax.Array]:
        return {"alpha": jax.vmap(weights)(state.rows.psi, jnp.arange(n))}

    return Algorithm(init, send, train, receive, personal, model.apply, traffic, observe)


def _check(
    k: int, granularity: str, normalise: str, step: str, rate: float, layers: int, of: Federation
) -> None:
    if of.clients < 2:
        raise UsageError("pfedla mixes models of several clients; clients must be at least 2")
    if of.groups.any():
        raise UsageError("pfedla mixes models of one architecture; use it without groups")
    for name, value, choices in (
        ("granularity", granularity, ("layer", "model")),
        ("normalise", normalise, NORMALISE),
        ("step", step, ("plain", "scaled")),
    ):
        if value not in choices:
            raise UsageError(f"pfedla.{name} is {value!r}; choose {' or '.join(choices)}")
    if not 0 <= k <= layers:
        raise UsageError(f"pfedla.k is {k}; the network has {layers} layers, choose 0 to {layers}")
    if rate <= 0:
        raise UsageError(f"pfedla.rate is {rate}; it must be above 0")
