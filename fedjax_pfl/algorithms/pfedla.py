"""pFedLA and HeurpFedLA: the server mixes each client's model layer by layer.

Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, 2022. With θ_j the
stored model of client j, ψ_i the hypernetwork of client i (its embedding v_i included) and
α_i = HN(ψ_i) of shape [L, N]:

  θ̄_i^l = Σ_j α_i^{l,j} θ_j^l                             (6), all from one snapshot
  θ_i    = local training from θ̄_i, Δθ_i = θ_i − θ̄_i      (Algorithm 1)
  ψ_i   ← ψ_i + η (∂θ̄_i/∂ψ_i)ᵀ Δθ_i                       (10), (11)

The paper leaves α's normalisation, the sizes and η open; its public re-implementations take
relu(x)/Σ, this step ("plain") and η = .005, with which α stays uniform for hundreds of rounds. With
step="scaled" Δθ_i^l is divided by its squared norm first, so that η has no unit. Both follow
training, along which a client's own last model always lies, and so α runs to the identity: Local.

With step="held_out" a client leaves a fold of its examples out of a round's training, another one
each round, and also uploads g_i, the gradient of the loss on it at θ̄_i. With r_i what softmax makes
α_i of, J = ∂r_i/∂ψ_i, and c_i^{l,j} = −⟨θ_j^l, g_i^l⟩ less its mean over j (nats, to first order)

  ψ_i   ← ψ_i + η Jᵀc_i ‖c_i‖² / ‖Jᵀc_i‖²                 r_i moves by η c_i along c_i

so that a client weighs models by what helps on examples that were not just trained on.

HeurpFedLA (12): in every round the k layers with the largest α_i^{l,i} stay θ_i^l; they do not come
down and give the hypernetwork no gradient.

Deviations: held_out is ours, and the default; it doubles what goes up. The other steps go towards
the trained model; both public implementations go the other way.
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
from fedjax_pfl.core.errors import UsageError, need
from fedjax_pfl.core.examples import without_fold
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks.layer_mixing import gains, mix, moved, scaled
from fedjax_pfl.networks.layer_weights import NORMALISE, LayerWeights, alpha

CHOICES = {
    "granularity": ("layer", "model"),
    "normalise": NORMALISE,
    "step": ("held_out", "scaled", "plain"),
}


class Rows(NamedTuple):
    """What the server keeps for each client."""

    theta: PyTree  # its parameters as it last uploaded them
    psi: PyTree  # its hypernetwork's parameters


class Client(NamedTuple):
    """What stays with each client."""

    rest: PyTree  # BatchNorm statistics
    momentum: PyTree


def pfedla(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    k: int = 0,
    granularity: str = "layer",
    normalise: str = "softmax",
    step: str = "held_out",
    folds: int = 5,
    rate: float = 0.5,
    embedding: int = 100,
    hidden: int = 100,
    depth: int = 3,
) -> Algorithm:
    """Layer-wise mixing by a hypernetwork per client.

    Args:
      k: layers that each client retains (HeurpFedLA); 0 is pFedLA.
      granularity: layer, or model: one weight per client for its whole model.
      normalise: how weights become shares α: softmax, or relu for relu(x)/Σ.
      step: what hypernetworks learn from: held_out examples; or, as published, from training, plain
        or scaled, each layer's change divided by its squared norm.
      folds: with held_out, a round of a client leaves one in so many of its examples out.
      rate: η: with held_out of weights' logarithms for each nat of loss, else of SGD.
      embedding: length of each hypernetwork's embedding.
      hidden: outputs of each of its hidden layers.
      depth: how many of those there are.
    """
    n = federation.clients
    variables = jax.eval_shape(lambda: common.initial(model, federation, jax.random.key(0), None))
    bytes_of = trees.bytes_per_layer(variables["params"])
    number = {name: j if granularity == "layer" else 0 for j, name in enumerate(bytes_of)}
    layers = max(number.values()) + 1
    words = {"granularity": granularity, "normalise": normalise, "step": step}
    _check(layers, federation, k, folds, rate, **words)
    held_out = step == "held_out"
    layer_of = trees.map_layers(lambda name, leaf: number[name], variables["params"])
    from_input = [number[name] for name in model.layers if name in number] if k else range(layers)
    places = jnp.asarray(list(dict.fromkeys(from_input)))
    sgd = common.trainer(model, task, training)
    network = LayerWeights(n, layers, embedding, hidden, depth, normalise)

    def raw(psi: PyTree) -> jax.Array:
        return jnp.asarray(network.apply({"params": psi}))

    def allowed(i: Any) -> jax.Array:
        """Bool [N]: novel clients weigh nothing for others, and something for themselves."""
        return jnp.asarray(federation.active) | (jnp.arange(n) == i)

    def weights(psi: PyTree, i: Any) -> jax.Array:
        """α_i: [L, N]."""
        return alpha(raw(psi), i, allowed(i), normalise)

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
        extra = {}
        if held_out:
            data, fold = without_fold(visit.data, visit.t, folds)
            extra["gradient"] = local_training.slope(model, task, variables, data, fold)
            visit = visit._replace(data=data)
        trained, momentum, metrics = sgd(variables, client.momentum, visit)
        params, rest = local_training.split_variables(trained)
        return Trained({"params": params, **extra}, trained, Client(rest, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, Rows]:
        rows = state.rows

        def learn(i: jax.Array, payload: PyTree, upload: PyTree) -> PyTree:
            psi = trees.row(rows.psi, i)
            if held_out:
                gain = gains(rows.theta, upload["gradient"], layer_of, layers, allowed(i))
                return moved(raw, psi, jnp.where(payload["retained"][:, None], 0.0, rate * gain))
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
        # The gradient weighs what the model does.
        return Traffic(down, {name: (1 + held_out) * b for name, b in bytes_of.items()})

    def observe(state: State) -> dict[str, jax.Array]:
        return {"alpha": jax.vmap(weights)(state.rows.psi, jnp.arange(n))}

    return Algorithm(init, send, train, receive, personal, model.apply, traffic, observe)


def _check(layers: int, of: Federation, k: int, folds: int, rate: float, **words: str) -> None:
    if of.clients < 2:
        raise UsageError("pfedla mixes models of several clients; clients must be at least 2")
    if of.groups.any():
        raise UsageError("pfedla mixes models of one architecture; use it without groups")
    for name, value in words.items():
        if value not in CHOICES[name]:
            choices = " or ".join(CHOICES[name])
            raise UsageError(f"pfedla.{name} is {value!r}; choose {choices}")
    if words["step"] == "held_out" and words["normalise"] != "softmax":
        raise UsageError("pfedla.step=held_out moves a softmax; use it with normalise=softmax")
    need(
        0 <= k <= layers,
        f"pfedla.k is {k}; the network has {layers} layers, choose 0 to {layers}",
    )
    need(folds >= 2, f"pfedla.folds is {folds}; it must be at least 2")
    need(rate >= 0, f"pfedla.rate is {rate}; it must be at least 0")
