"""FedALA: each client learns elementwise weights between its own and the global model.

Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, 2023.

  θ̂_i = θ in the early layers, W ⊙ θ + (1 − W) ⊙ θ_i in the last p, with the client's last model θ_i
  W ← clip(W − η_W (θ − θ_i) ⊙ ∇f(θ̂_i; B), 0, 1), from 1, by passes over a share of its examples
  θ_i ← local SGD from θ̂_i, and θ ← Σ_k n_k θ_k / Σ_k n_k

A client is served θ̂_i with the current θ. W stays on the client between rounds.

Deviations: the first time, W is learned in a fixed number of passes; in the paper until the loss
converges. The share of examples is sampled at random, not a contiguous block. BatchNorm statistics
are those of θ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows
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
from fedjax_pfl.core.examples import take_repeating


class Mixing(NamedTuple):
    """One client's last layers, and the weights that mix them with those of the global model."""

    theta: PyTree  # parameters θ_i of the last `layers` layers of the client's last model
    weights: PyTree  # W in [0, 1], in the structure of theta; 1 takes the global parameter
    learned: jax.Array  # bool []; False until W has been learned for the first time


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    mixing: Mixing  # the client's last layers and their mixing weights
    momentum: PyTree  # optimiser state, or () if clients do not keep it


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
    """Creates FedALA: clients learn elementwise weights W between their own and the global model.

    Training starts from the mixed model. With η_W = 0 it is FedAvg. The server stores the same as
    FedAvg, clients store `Client`.

    Args:
      layers: p, the number of the last layers that W mixes. A BatchNorm is not counted; it belongs
        to the layer before it.
      weight_rate: η_W, the learning rate of W.
      share: Fraction of a client's examples used to learn W in a round.
      first_passes: Passes over these examples the first time W is learned. Later there is one.
    """
    require_at_least("fedala.weight_rate", weight_rate, 0)
    require_at_least("fedala.first_passes", first_passes, 1)
    require((share > 0) & (share <= 1), f"fedala.share is {share}; choose above 0, to 1")
    late = last_layers(model, federation, "fedala.layers", layers, early=0)
    base = fedavg(model, training, federation)

    def parts(params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (parameters of the last `layers` layers, parameters of the others)."""
        late_part, early_part = trees.split({"params": params}, late)
        return late_part["params"], early_part.get("params", {})

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        theta = parts(state.server["params"])[0]
        first = Mixing(theta, jax.tree.map(jnp.ones_like, theta), jnp.zeros((), bool))
        mixing = initial_client_rows(first, start, Client, "mixing", federation)
        return state._replace(clients=Client(mixing, state.clients))

    def mix(theta: PyTree, mixing: Mixing, ctx: ClientContext) -> tuple[PyTree, PyTree, jax.Array]:
        """Learns W of one client from `theta`, the variables of the global model.

        Returns the variables of the mixed model, W, and `Mixing.learned`.
        """
        data, split = ctx.data, ctx.data.train
        params, model_state = local_training.split_variables(theta)
        new, early = parts(params)
        keys = jax.random.split(jax.random.fold_in(ctx.key, 1))
        longest, size = split.rows.shape[0], min(training.batch_size, split.rows.shape[0])
        order = batches.random_order(keys[0], longest, split.size)
        rows = jnp.pad(split.rows[order], (0, -longest % size))
        examples = jnp.clip(jnp.round(share * split.size.astype(jnp.float32)), 1.0)
        examples = jnp.minimum(examples.astype(jnp.int32), split.size)
        gradient = local_training.gradient(model, federation.task, data)
        per_pass = -(-examples // size)

        def blend(weights: PyTree) -> PyTree:
            """Returns the parameters of the mixed model, of all layers."""
            mixed = jax.tree.map(lambda w, a, b: w * a + (1 - w) * b, weights, new, mixing.theta)
            return trees.join(early, mixed)

        def step(s: jax.Array, weights: PyTree) -> PyTree:
            """Returns W after a gradient step on batch s."""
            place = (s % per_pass) * size
            mask = place + jnp.arange(size) < examples
            batch = take_repeating(data, jax.lax.dynamic_slice(rows, (place,), (size,)), mask)
            _, grads = gradient(blend(weights), model_state, batch, jax.random.fold_in(keys[1], s))
            return jax.tree.map(
                lambda w, g, a, b: jnp.clip(w - weight_rate * (a - b) * g, 0, 1),
                weights, parts(grads)[0], new, mixing.theta,
            )  # fmt: skip

        passes = jnp.where(mixing.learned, 1, first_passes)
        weights = jax.lax.fori_loop(0, passes * per_pass, step, mixing.weights)
        difference = trees.squared_norm(jax.tree.map(jnp.subtract, new, mixing.theta))
        learned = mixing.learned | (difference > 0)
        return {"params": blend(weights), **model_state}, weights, learned

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        start, weights, learned = mix(payload, client.mixing, ctx)
        result = base.train(start, client.momentum, ctx)
        theta = parts(result.variables["params"])[0]
        client = Client(Mixing(theta, weights, learned), result.client)
        return result._replace(client=client)

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return mix(state.server, client.mixing, ctx)[0]

    return base._replace(init=init, train=train, personalize=personalize)


FEDALA = Method(fedala, title="FedALA", paper="Zhang et al. 2023")
