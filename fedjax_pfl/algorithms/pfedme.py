"""pFedMe: personal models θ tied to a global w by a penalty; w follows the Moreau envelope.

Dinh et al., Personalized Federated Learning with Moreau Envelopes, 2020.

A local round uses one batch B: θ ← θ − η_p (∇f(θ; B) + λ (θ − w)) K times, then
w ← w − ηλ (w − θ). Server: w ← (1 − β) w + β · mean_k w_k, the unweighted mean over the clients
that returned an update. A client is served the θ after its local rounds from the current w, as in
the authors' code: K steps from w on one batch would be a weaker model.

Deviations: the paper runs the inner steps to a given accuracy, here there are K. The default η_p is
0.05; the authors' commands have 0.01 to 0.1. θ starts at the
downloaded w and is kept between local rounds. Clipping, decay and momentum, if set, act on the
step of w; the steps of θ are plain SGD. BatchNorm statistics are those of the passes at θ, are
uploaded with w and averaged without β, which above 1 would make variances negative.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require, require_above, require_at_least
from fedjax_pfl.core.examples import Batch


def pfedme(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 15.0,
    inner_steps: int = 5,
    inner_rate: float = 0.05,
    beta: float = 1.0,
) -> Algorithm:
    """Creates pFedMe: a client's model θ minimises its loss + λ/2 ‖θ − w‖² around the global w.

    Server and clients store the same as FedAvg. θ is not stored: `personalize` trains it from the
    current w.

    Args:
      penalty: λ, the weight of the distance between the client's and the global model.
      inner_steps: K, the steps of the client's model on each batch.
      inner_rate: η_p, the learning rate of these steps. `learning_rate` is η.
      beta: β, the share of the clients' mean in the new global model; 1 replaces it by the mean.
    """
    require_above("pfedme.penalty", penalty, 0)
    require_above("pfedme.inner_rate", inner_rate, 0)
    require_above("pfedme.beta", beta, 0)
    require_at_least("pfedme.inner_steps", inner_steps, 1)
    require(
        penalty * inner_rate < 2,
        f"pfedme.penalty {penalty} times inner_rate {inner_rate} must be below 2, otherwise inner "
        "steps diverge; use a smaller inner_rate",
    )

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        params, model_state = local_training.split_variables(payload)
        gradient = local_training.gradient(model, federation.task, ctx.data)

        def envelope_gradient(w: PyTree, carry: PyTree, batch: Batch, key: jax.Array) -> Any:
            """Returns ((last loss, (θ, model state)), λ (w − θ)) after K steps of θ on the batch.

            `carry` is (θ, model state) before these steps.
            """

            def step(k: jax.Array, inner: Any) -> Any:
                """Takes inner step k; `inner` is (θ, model state, last loss)."""
                theta, model_state, _ = inner
                (loss, model_state), grads = gradient(
                    theta, model_state, batch, jax.random.fold_in(key, k)
                )
                theta = jax.tree.map(
                    lambda x, g, a: x - inner_rate * (g + penalty * (x - a)), theta, grads, w
                )
                return theta, model_state, loss

            start = (*carry, jnp.zeros(()))
            theta, model_state, loss = jax.lax.fori_loop(0, inner_steps, step, start)
            grads = jax.tree.map(lambda a, x: penalty * (a - x), w, theta)
            return (loss, (theta, model_state)), grads

        w, (theta, model_state), momentum, metrics = local_training.fit(
            training, envelope_gradient, params, (params, model_state), client, ctx
        )
        return ClientResult(
            upload={"params": w, **model_state},
            variables={"params": theta, **model_state},
            client=momentum,
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        mean = cohort.mean(cohort.uploads, state.server, cohort.arrived)
        mixed = jax.tree.map(
            lambda old, new: (1 - beta) * old + beta * new, state.server["params"], mean["params"]
        )
        return {**mean, "params": mixed}, state.rows

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return train(state.server, client, ctx).variables

    base = fedavg(model, training, federation)
    return base._replace(train=train, receive=receive, personalize=personalize)


PFEDME = Method(pfedme, title="pFedMe", paper="Dinh et al. 2020")
