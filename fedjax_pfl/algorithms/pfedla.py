"""pFedLA and HeurpFedLA: the server mixes each client's model layer by layer.

Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, 2022. With θ_j the
stored model of client j, ψ_i the hypernetwork of client i (its embedding v_i included) and
α_i = HN(ψ_i) of shape [L, N]:

  θ̄_i^l = Σ_j α_i^{l,j} θ_j^l                             (6), all from one snapshot
  θ_i    = local training from θ̄_i, Δθ_i = θ_i − θ̄_i      (Algorithm 1)
  ψ_i   ← ψ_i + η (∂θ̄_i/∂ψ_i)ᵀ Δθ_i                       (10), (11)

The paper leaves α's normalisation and η open; public re-implementations take relu(x)/Σ, this step
("plain") and η = .005: α stays uniform. With step="scaled" Δθ_i^l is divided by its squared norm.
Both follow training, along which a client's own last model lies, and nearly all rows of α run to
it: Local, but for small layers, which may end as another client's.

With step="held_out" a client leaves a fold of its examples out of a round's training, another one
each round, and also uploads g_i, the gradient of the loss on it at θ̄_i, so that it weighs models by
what helps on examples that were not just trained on. With r_i what softmax makes α_i of, J =
∂r_i/∂ψ_i, and c_i^{l,j} = −⟨θ_j^l, g_i^l⟩ less its mean over j (nats, to first order)

  ψ_i   ← ψ_i + η Jᵀc_i ‖c_i‖² / ‖Jᵀc_i‖²                 r_i moves by η c_i along c_i

HeurpFedLA (12): in every round the k layers with the largest α_i^{l,i} stay θ_i^l; they do not come
down and give the hypernetwork no gradient.

Deviations: held_out, which doubles what goes up, and refresh=R are ours, and the defaults: in the
last of every R rounds all layers come down, since one that stays for good never meets the others'.
The other steps go towards the trained model; both public implementations go the other way.
BatchNorm's statistics stay with the clients, its scale and shift are a layer like any other.
With candidates=M, sums and means over j are over M clients: i itself, and those others whose
Δθ had the largest cosines with Δθ_i when both were in a round. With M = N it is the method above.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.algorithms import candidates as many
from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.layer_mixing import check, gains, largest, mix, moved, rows_of, scaled
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
from fedjax_pfl.core.examples import without_fold
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks.layer_weights import LayerWeights, alpha


class Rows(NamedTuple):
    """What the server keeps for each client."""

    theta: PyTree  # its parameters as it last uploaded them
    psi: PyTree  # its hypernetwork's parameters
    candidates: many.Known  # whom it mixes; empty where that is everybody


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
    refresh: int = 4,
    granularity: str = "layer",
    normalise: str = "softmax",
    step: str = "held_out",
    folds: int = 5,
    rate: float = 0.5,
    embedding: int = 100,
    hidden: int = 100,
    depth: int = 3,
    candidates: int | None = None,
) -> Algorithm:
    """Layer-wise mixing by a hypernetwork per client.

    Args:
      k: layers that each client retains (HeurpFedLA); 0 is pFedLA.
      refresh: once in so many rounds these come down too; 0: never, as published.
      granularity: layer, or model: one weight per client for its whole model.
      normalise: how weights become shares α: softmax, or relu for relu(x)/Σ.
      step: what hypernetworks learn from: held_out examples; or, as published, from training, plain
        or scaled, each layer's change divided by its squared norm.
      folds: with held_out, a round of a client leaves one in so many of its examples out.
      rate: η: with held_out of weights' logarithms for each nat of loss, else of SGD.
      embedding: length of each hypernetwork's embedding.
      hidden: outputs of each of its hidden layers.
      depth: how many of those there are.
      candidates: M, how many clients each one mixes, itself included; unset: all. Not as published.
    """
    n, held_out = federation.clients, step == "held_out"
    shapes = common.shapes(model, federation)["params"]
    bytes_of = trees.bytes_per_layer(shapes)
    layers = rows_of(shapes, model.layers if k else (), granularity == "model")
    sizes = {"embedding": embedding, "hidden": hidden, "depth": depth}
    check(federation, layers.number, k, refresh, granularity, normalise, step, folds, rate, sizes)
    many.check(n, candidates)
    sgd, m = common.trainer(model, task, training), candidates or n
    network = LayerWeights(m, layers.number, embedding, hidden, depth, normalise)

    def raw(psi: PyTree) -> jax.Array:
        return jnp.asarray(network.apply({"params": psi}))

    def near(rows: Rows, i: Any) -> many.Near:
        """The models that client i mixes: all, or its candidates'."""
        return many.near(rows.candidates, rows.theta, i, federation)

    def weights(psi: PyTree, near: many.Near) -> jax.Array:
        """α_i: [L, N], or [L, M]."""
        return alpha(raw(psi), near.own, near.allowed, normalise)

    def retained(psi: PyTree, near: many.Near, t: jax.Array) -> jax.Array:
        """Bool [L]: the k layers with the largest weight on the client's own."""
        stay = not refresh or t % refresh != refresh - 1
        return stay & largest(weights(psi, near)[:, near.own], k, layers)

    def served(psi: PyTree, near: many.Near, kept: jax.Array) -> PyTree:
        """θ̄_i: mixed, but for the retained layers."""
        own = jax.nn.one_hot(near.own, m)
        return mix(near.theta, jnp.where(kept[:, None], own, weights(psi, near)), layers)

    def init(key: jax.Array, start: State | None = None) -> State:
        first = common.initial(model, federation, key, start)
        params, rest = local_training.split_variables(first)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))
        psi = jax.vmap(network.init)(keys)["params"]
        stays = Client(trees.repeat(rest, n), common.kept(training, params, federation))
        whom = many.first(federation, candidates, key)
        return State((), Rows(trees.repeat(params, n), psi, whom), stays)

    def send(state: State, visit: Visit) -> PyTree:
        psi, others = trees.row(state.rows.psi, visit.i), near(state.rows, visit.i)
        kept = retained(psi, others, visit.t)
        return {"params": served(psi, others, kept), "retained": kept}

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
            psi, others = trees.row(rows.psi, i), near(rows, i)
            if held_out:
                gain = gains(others.theta, upload["gradient"], layers, others.allowed)
                return moved(raw, psi, jnp.where(payload["retained"][:, None], 0.0, rate * gain))
            delta = jax.tree.map(jnp.subtract, upload["params"], payload["params"])
            delta = scaled(delta, layers) if step == "scaled" else delta
            mixed = partial(served, near=others, kept=payload["retained"])
            (direction,) = jax.vjp(mixed, psi)[1](delta)
            return optax.tree.add_scale(psi, rate, direction)

        psi = jax.vmap(learn)(cohort.ids, cohort.payloads, cohort.uploads)
        whom = many.after(rows.candidates, cohort, federation)
        return state.server, cohort.put(rows, Rows(cohort.uploads["params"], psi, whom))

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        return {"params": send(state, visit)["params"], **client.rest}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        stays = payload["retained"]
        down = {name: jnp.where(stays[layers.row[name]], 0, b) for name, b in bytes_of.items()}
        # The gradient weighs what the model does.
        return Traffic(down, {name: (1 + held_out) * b for name, b in bytes_of.items()})

    def observe(state: State) -> dict[str, jax.Array]:
        def own(i: jax.Array) -> jax.Array:
            return weights(trees.row(state.rows.psi, i), near(state.rows, i))

        alpha = jax.lax.map(own, jnp.arange(n), batch_size=256)
        return {"alpha": alpha, **many.observed(state.rows.candidates)}

    parts = (init, send, train, receive, personal, model.apply, traffic, observe)
    return Algorithm(*parts, far=("theta", "psi"))
