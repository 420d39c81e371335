"""SCAFFOLD: control variates take the clients' drift out of their steps.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020.

  y_i ← y_i − η (g_i(y_i) − c_i + c), from y_i = x;   c_i⁺ = mean of the g_i(y_i) of all steps
  x ← x + η_g mean_k (y_k − x);   c ← c + 1/N Σ_k (c_k⁺ − c_k), over those that arrived, of N
Where steps are plain SGD the mean of g_i is the paper's option II, c_i − c + (x − y_i)/(Kη); and it
is defined for any optimiser, rate schedule and number of steps. So c is the mean of all c_i, and
stays so whoever drops out.

Deviations: none with plain SGD. Momentum, decay and clipping, where they are set, come behind the
correction. Means are plain, as in the paper, not weighted by examples; BatchNorm statistics are
averaged and have no control variate.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require_above
from fedjax_pfl.core.examples import Batch


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # the control variate c_i, as the parameters are
    momentum: PyTree


def scaffold(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    server_rate: float = 1.0,
) -> Algorithm:
    """Server: the variables x and, as `control`, c; both come down. Clients: `Client`.

    Args:
      server_rate: η_g, how far the server goes to the mean of the models; 1 is all the way.
    """
    require_above("scaffold.server_rate", server_rate, 0)
    average = fedavg(model, training, federation)
    clients = int(federation.active.sum())

    def model_of(tree: PyTree) -> PyTree:
        return {name: part for name, part in tree.items() if not name.startswith("control")}

    def init(key: jax.Array, start: State | None = None) -> State:
        state = average.init(key, start)
        zeros = jax.tree.map(jnp.zeros_like, state.server["params"])
        own = common.own_first(zeros, start, Client, federation)
        active = jnp.asarray(federation.active, jnp.float32)
        control = trees.weighted_mean(own, active)
        return State({**state.server, "control": control}, (), Client(own, state.clients))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        plain = local_training.gradient(model, federation.task, ctx.data)

        def corrected(y: PyTree, carried: Any, batch: Batch, key: jax.Array) -> Any:
            rest, total, steps = carried
            (loss, rest), grads = plain(y, rest, batch, key)
            carried = rest, jax.tree.map(jnp.add, total, grads), steps + 1
            step = jax.tree.map(
                lambda g, own, c: g - own + c, grads, client.own, payload["control"]
            )
            return (loss, carried), step

        x, rest = local_training.split_variables(model_of(payload))
        carried = rest, jax.tree.map(jnp.zeros_like, x), jnp.zeros((), jnp.float32)
        y, (rest, total, steps), momentum, metrics = local_training.fit(
            training, corrected, x, carried, client.momentum, ctx
        )
        mean = jax.tree.map(lambda g: g / jnp.maximum(steps, 1.0), total)
        own = trees.where(steps > 0, mean, client.own)
        trained = {"params": y, **rest}
        change = jax.tree.map(jnp.subtract, own, client.own)
        return ClientResult(
            {**trained, "control_change": change}, trained, Client(own, momentum), metrics
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        old, uploads = state.server, cohort.uploads
        mean = cohort.mean(model_of(uploads), model_of(old), cohort.arrived)
        params = jax.tree.map(
            lambda x, y: (1 - server_rate) * x + server_rate * y, old["params"], mean["params"]
        )
        changes = cohort.present(uploads["control_change"])
        control = jax.tree.map(lambda c, d: c + jnp.sum(d, 0) / clients, old["control"], changes)
        return {**mean, "params": params, "control": control}, state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return model_of(state.server)

    return average._replace(init=init, train=train, receive=receive, personalize=personalize)


SCAFFOLD = Method(scaffold, title="SCAFFOLD", paper="Karimireddy et al. 2020")
