"""FedALA: each client learns, number by number, how much of the global model it takes in.

Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, 2023.

  θ̂_i = θ in the early layers, W ⊙ θ + (1 − W) ⊙ θ_i in the last p;  θ_i the client's own last model
  W ← clip(W − η_W (θ − θ_i) ⊙ ∇f(θ̂_i; B), 0, 1), from 1, some passes over a share of its examples
  θ_i ← local SGD from θ̂_i, and θ ← Σ_k n_k θ_k / Σ_k n_k
A client is served θ̂_i, of the θ of now. W stays with the client from visit to visit.

Deviations: where a client first learns W it makes a set number of passes; the paper goes on until
the losses stand still. The share is drawn example by example, not as a stretch of them. BatchNorm
statistics come with θ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import last_layers
from fedjax_pfl.core import batches, local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require, require_at_least
from fedjax_pfl.core.examples import take


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # θ_i's last layers, W as they are, and whether W has been learned
    momentum: PyTree


def fedala(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    layers: int = 1,
    weight_rate: float = 1.0,
    share: float = 0.8,
    first_passes: int = 10,
) -> Algorithm:
    """Server: FedAvg's, and with η_W = 0 all is FedAvg's. Clients: `Client`.

    Args:
      layers: p, so many of the last layers are taken in by W. A BatchNorm is not counted and goes
        with the layer before it.
      weight_rate: η_W.
      share: of a client's examples, on which W is learned in a visit.
      first_passes: over them, where W is learned for the first time; later it is one.
    """
    require_at_least("fedala.weight_rate", weight_rate, 0)
    require_at_least("fedala.first_passes", first_passes, 1)
    require((share > 0) & (share <= 1), f"fedala.share is {share}; choose above 0, to 1")
    late = last_layers(model, federation, "fedala.layers", layers, early=0)
    average = fedavg(model, training, federation)

    def parts(params: PyTree) -> tuple[PyTree, PyTree]:
        chosen, others = trees.split({"params": params}, late)
        return chosen["params"], others.get("params", {})

    def init(key: jax.Array, start: State | None = None) -> State:
        state = average.init(key, start)
        theta = parts(state.server["params"])[0]
        first = {
            "theta": theta,
            "weights": jax.tree.map(jnp.ones_like, theta),
            "learned": jnp.zeros((), bool),
        }
        own = common.own_first(first, start, Client, federation)
        return state._replace(clients=Client(own, state.clients))

    def take_in(theta: PyTree, own: PyTree, ctx: ClientContext) -> tuple[PyTree, PyTree, jax.Array]:
        """θ̂_i, W, and whether it has been learned."""
        data, split = ctx.data, ctx.data.train
        params, rest = local_training.split_variables(theta)
        new, early = parts(params)
        keys = jax.random.split(jax.random.fold_in(ctx.key, 1))
        longest, size = split.rows.shape[0], min(training.batch_size, split.rows.shape[0])
        order = batches.random_order(keys[0], longest, split.size)
        rows = jnp.pad(split.rows[order], (0, -longest % size))
        chosen = jnp.clip(jnp.round(share * split.size.astype(jnp.float32)), 1.0)
        examples = jnp.minimum(chosen.astype(jnp.int32), split.size)
        gradient = local_training.gradient(model, federation.task, data)
        per_pass = -(-examples // size)

        def blend(weights: PyTree) -> PyTree:
            mixed = jax.tree.map(lambda w, a, b: w * a + (1 - w) * b, weights, new, own["theta"])
            return trees.join(early, mixed)

        def step(s: jax.Array, weights: PyTree) -> PyTree:
            place = (s % per_pass) * size
            mask = place + jnp.arange(size) < examples
            batch = take(data, jax.lax.dynamic_slice(rows, (place,), (size,)), mask)
            _, grads = gradient(blend(weights), rest, batch, jax.random.fold_in(keys[1], s))
            return jax.tree.map(
                lambda w, g, a, b: jnp.clip(w - weight_rate * (a - b) * g, 0, 1),
                weights, parts(grads)[0], new, own["theta"],
            )  # fmt: skip

        passes = jnp.where(own["learned"], 1, first_passes)
        weights = jax.lax.fori_loop(0, passes * per_pass, step, own["weights"])
        apart = trees.squared_norm(jax.tree.map(jnp.subtract, new, own["theta"]))
        learned = own["learned"] | (apart > 0)
        return {"params": blend(weights), **rest}, weights, learned

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        start, weights, learned = take_in(payload, client.own, ctx)
        done = average.train(start, client.momentum, ctx)
        theta = parts(done.variables["params"])[0]
        own = {"theta": theta, "weights": weights, "learned": learned}
        return done._replace(client=Client(own, done.client))

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return take_in(state.server, client.own, ctx)[0]

    return average._replace(init=init, train=train, personalize=personalize)


FEDALA = Method(fedala, title="FedALA", paper="Zhang et al. 2023")
