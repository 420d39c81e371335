"""APFL: each client trains its own model as part of a mixture with the global model.

Deng et al., Adaptive Personalized Federated Learning, 2020.

  w_k ← w_k − η ∇f(w_k; B), and w ← Σ_k n_k w_k / Σ_k n_k: FedAvg
  v_k ← v_k − η α ∇f(v̄_k; B)                           v̄_k = α v_k + (1 − α) w_k
  α ← α − η_α ⟨v_k − w_k, ∇f(v̄_k; B)⟩, clipped to [0, 1], with the first batch of each round
All three steps use the values before the step. The client's model is v̄ with the current w.

Deviations: w is the mean weighted by examples, in the paper it is unweighted. An adaptive α has its
own learning rate; in the paper it has the rate of training, and the authors' code also decays α.
Gradients of v and w are clipped separately. BatchNorm statistics of w are uploaded; those of v̄ stay
on the client.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows, initial_momentum
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, optimizers, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.diagnostics import Picture
from fedjax_pfl.core.errors import require, require_at_least
from fedjax_pfl.core.examples import Batch


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    variables: PyTree  # parameters v of its own model, BatchNorm statistics of the mixture
    alpha: jax.Array  # float32 []; α, the share of v in the mixture
    momentum: PyTree  # optimiser state of v and the copy of w, or () if not kept


def apfl(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    alpha: float = 0.5,
    alpha_rate: float = 0.0,
) -> Algorithm:
    """Creates APFL: a client trains the global model w and its own v, and uses α v + (1 − α) w.

    α = 1 gives Local, α = 0 gives FedAvg, apart from BatchNorm statistics. The server stores the
    variables of w, as FedAvg does; clients store `Client`.

    Args:
      alpha: α, the share of a client's own model in the mixture; the initial share if it adapts.
      alpha_rate: η_α, the learning rate of α, which takes one step a round; 0 keeps α fixed. A
        later phase continues shares that adapt.
    """
    require((alpha >= 0) & (alpha <= 1), f"apfl.alpha is {alpha}; it is a share, 0 to 1")
    require_at_least("apfl.alpha_rate", alpha_rate, 0)
    base = fedavg(model, training, federation)
    separate = training.with_optimizer(optimizers.per_entry(training.optimizer))

    def mix(alpha: jax.Array, v: PyTree, w: PyTree) -> PyTree:
        """Returns the parameters α v + (1 − α) w."""
        mixture = jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, v, w)
        return trees.with_dtypes(mixture, w)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        v = initial_client_rows(state.server, start, Client, "variables", federation)
        initial, w = jnp.float32(alpha), state.server["params"]
        alphas = jnp.full(federation.clients, initial)
        if start is not None:
            adapted = initial_client_rows(initial, start, Client, "alpha", federation)
            alphas = jnp.where(alpha_rate > 0, adapted, alphas)
        momentum = initial_momentum(separate, {"v": w, "w": w}, federation)
        return state._replace(clients=Client(v, alphas, momentum))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        gradient = local_training.gradient(model, federation.task, ctx.data)

        def gradients(params: PyTree, carry: Any, batch: Batch, key: jax.Array) -> Any:
            """Returns ((loss of the mixture, new carry), {"v": gradient, "w": gradient})."""
            w_stats, mixture_stats, alpha, rate = carry
            (_, w_stats), w_grads = gradient(params["w"], w_stats, batch, key)
            (loss, mixture_stats), mixture_grads = gradient(
                mix(alpha, **params), mixture_stats, batch, key
            )
            products = jax.tree.map(
                lambda v, w, g: jnp.sum((v - w) * g), params["v"], params["w"], mixture_grads
            )
            new_alpha = alpha - rate * jnp.sum(jnp.stack(jax.tree.leaves(products)))
            v_grads = jax.tree.map(lambda g: alpha * g, mixture_grads)
            # Later steps of the round do not change α.
            carry = w_stats, mixture_stats, jnp.clip(new_alpha, 0, 1), jnp.zeros_like(rate)
            return (loss, carry), {"v": v_grads, "w": w_grads}

        w, w_stats = local_training.split_variables(payload)
        v, mixture_stats = local_training.split_variables(client.variables)
        carry = w_stats, mixture_stats, client.alpha, jnp.float32(alpha_rate)
        new, (w_stats, mixture_stats, alpha, _), momentum, metrics = local_training.fit(
            separate, gradients, {"v": v, "w": w}, carry, client.momentum, ctx
        )
        new_client = Client({"params": new["v"], **mixture_stats}, alpha, momentum)
        mixture = {"params": mix(alpha, **new), **mixture_stats}
        return ClientResult(
            upload={"params": new["w"], **w_stats},
            variables=mixture,
            client=new_client,
            metrics=metrics,
        )

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        v, w = client.variables["params"], state.server["params"]
        return {**client.variables, "params": mix(client.alpha, v, w)}

    def observe(state: State) -> dict[str, jax.Array]:
        return {"alpha": state.clients.alpha}

    return base._replace(init=init, train=train, personalize=personalize, observe=observe)


APFL = Method(
    apfl,
    title="APFL",
    paper="Deng et al. 2020",
    pictures={"alpha": Picture("Mixing weights, α", "the weight of each client's own model")},
)
