"""pFedMe: personal models θ tied to a global w by a penalty; w follows the Moreau envelope.

Dinh et al., Personalized Federated Learning with Moreau Envelopes, 2020.

A local round is one batch B: θ ← θ − η_p (∇f(θ; B) + λ (θ − w)) K times, then w ← w − ηλ (w − θ).
Server: w ← (1 − β) w + β · mean_k w_k, the plain mean over the clients that answered.
A client is served the θ at which its local rounds end, from the w of now, as the authors' code
evaluates: K steps from w on one batch would be a weaker model.

Deviations: K steps stand for the paper's inner accuracy; θ begins at the w that came down and goes
on from local round to local round. Clipping, decay and momentum, where they are set, act on the
step of w; θ's steps are plain. BatchNorm statistics come from the passes at θ, travel with w and
are averaged without β, which above 1 would make variances negative.
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
    """θ solves min f(θ) + λ/2 ‖θ − w‖² around each client's w; the w are averaged.

    Server and clients: as FedAvg; no θ is kept, `personalize` trains it from the current w.

    Args:
      penalty: λ, how firmly θ is tied to w.
      inner_steps: K, steps of θ on each batch.
      inner_rate: η_p, the rate of those steps; `learning_rate` is η.
      beta: β, how far the server goes to the new mean; 1 is all the way.
    """
    require_above("pfedme.penalty", penalty, 0)
    require_above("pfedme.inner_rate", inner_rate, 0)
    require_above("pfedme.beta", beta, 0)
    require_at_least("pfedme.inner_steps", inner_steps, 1)
    require(
        penalty * inner_rate < 2,
        f"pfedme.penalty {penalty} times inner_rate {inner_rate} is not below 2, and inner steps "
        "diverge from 2 on; use a smaller inner_rate",
    )

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        params, rest = local_training.split_variables(payload)
        gradient = local_training.gradient(model, federation.task, ctx.data)

        def envelope(w: PyTree, carried: PyTree, batch: Batch, key: jax.Array) -> Any:
            """λ (w − θ), with θ and statistics after K inner steps and the loss at the last."""

            def step(k: jax.Array, carry: Any) -> Any:
                theta, rest, _ = carry
                (loss, rest), grads = gradient(theta, rest, batch, jax.random.fold_in(key, k))
                theta = jax.tree.map(
                    lambda x, g, a: x - inner_rate * (g + penalty * (x - a)), theta, grads, w
                )
                return theta, rest, loss

            start = (*carried, jnp.zeros(()))
            theta, rest, loss = jax.lax.fori_loop(0, inner_steps, step, start)
            pull = jax.tree.map(lambda a, x: penalty * (a - x), w, theta)
            return (loss, (theta, rest)), pull

        w, (theta, rest), client, metrics = local_training.fit(
            training, envelope, params, (params, rest), client, ctx
        )
        return ClientResult({"params": w, **rest}, {"params": theta, **rest}, client, metrics)

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
