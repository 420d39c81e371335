"""APFL: a client's own model is trained in a mixture with the global one.

Deng et al., Adaptive Personalized Federated Learning, 2020.

  w_k ← w_k − η ∇f(w_k; B), and w ← Σ_k n_k w_k / Σ_k n_k: FedAvg
  v_k ← v_k − η α ∇f(v̄_k; B)                           v̄_k = α v_k + (1 − α) w_k
  α ← α − η_α ⟨v_k − w_k, ∇f(v̄_k; B)⟩, between 0 and 1, all three from the values before the step
A client is served v̄, of the w of now.

Deviations: where α moves it does so at each step and at a rate of its own; the paper gives it that
of training. Clipping measures v and w apart. BatchNorm statistics of w travel; those of v̄ stay
with the client.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.core import local_training, optimizers
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State, Trained, Visit
from fedjax_pfl.core.errors import at_least, need
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.task import Task


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # v, with the statistics of the mixture
    alpha: jax.Array  # float32 []
    momentum: PyTree  # of v and of w


def apfl(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    alpha: float = 0.5,
    alpha_rate: float = 0.0,
) -> Algorithm:
    """With α = 1 it is Local, with α = 0 FedAvg. Server: FedAvg's. Clients: `Client`.

    Args:
      alpha: α, the share of a client's own model in what it is served; at first, if it moves.
      alpha_rate: η_α; with 0 all keep the first α.
    """
    need((alpha >= 0) & (alpha <= 1), f"apfl.alpha is {alpha}; it is a share, 0 to 1")
    at_least("apfl.alpha_rate", alpha_rate, 0)
    average = fedavg(model, task, training, federation)
    apart = training._replace(optimizer=optimizers.apart(training.optimizer))

    def mix(alpha: jax.Array, v: PyTree, w: PyTree) -> PyTree:
        return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, v, w)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = average.init(key, start)
        own = common.own_first(state.server, start, Client, federation)
        first, w = jnp.full(federation.clients, alpha, jnp.float32), state.server["params"]
        momentum = common.kept(apart, {"v": w, "w": w}, federation)
        return state._replace(clients=Client(own, first, momentum))

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        plain = local_training.gradient(model, task, visit.data)

        def both(params: PyTree, carried: Any, batch: Batch, key: jax.Array) -> Any:
            of_w, of_mixture, alpha = carried
            (_, of_w), by_w = plain(params["w"], of_w, batch, key)
            (loss, of_mixture), by_mixture = plain(mix(alpha, **params), of_mixture, batch, key)
            products = jax.tree.map(
                lambda v, w, g: jnp.sum((v - w) * g), params["v"], params["w"], by_mixture
            )
            moved = alpha - alpha_rate * jnp.sum(jnp.stack(jax.tree.leaves(products)))
            by_v = jax.tree.map(lambda g: alpha * g, by_mixture)
            carried = of_w, of_mixture, jnp.clip(moved, 0, 1)
            return (loss, carried), {"v": by_v, "w": by_w}

        w, of_w = local_training.split_variables(payload)
        v, of_mixture = local_training.split_variables(client.own)
        new, (of_w, of_mixture, alpha), momentum, metrics = local_training.fit(
            apart, both, {"v": v, "w": w}, (of_w, of_mixture, client.alpha), client.momentum, visit
        )
        stays = Client({"params": new["v"], **of_mixture}, alpha, momentum)
        served = {"params": mix(alpha, **new), **of_mixture}
        return Trained({"params": new["w"], **of_w}, served, stays, metrics)

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        v, w = client.own["params"], state.server["params"]
        return {**client.own, "params": mix(client.alpha, v, w)}

    def observe(state: State) -> dict[str, jax.Array]:
        return {"alpha": state.clients.alpha}

    return average._replace(init=init, train=train, personal=personal, observe=observe)
