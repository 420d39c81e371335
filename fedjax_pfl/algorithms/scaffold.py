"""SCAFFOLD: control variates correct the drift of the clients' local steps.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020.

  y_i ← y_i − η (g_i(y_i) − c_i + c), from y_i = x;   c_i⁺ = mean of the g_i(y_i) of all steps
  x ← x + η_g mean_k (y_k − x);   c ← c + 1/N Σ_k (c_k⁺ − c_k), over those that arrived, of N

With plain SGD the mean of g_i is the paper's option II, c_i − c + (x − y_i)/(Kη). It is also
defined for other optimisers, rate schedules and numbers of steps. c is the mean of all c_i, also if
clients drop out, but not if uploads are compressed: clients keep the exact c_i. Nor is it exactly
the mean in bfloat16, where adding a change below 1/512 of c does nothing.

Deviations: none with plain SGD. Momentum, decay and clipping, if set, act after the correction.
Means are not weighted by examples, as in the paper. BatchNorm statistics are averaged and have no
control variate.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows
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
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    control: PyTree  # control variate c_i, in the structure of the parameters
    momentum: PyTree  # optimiser state, or () if clients do not keep it


def scaffold(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    server_rate: float = 1.0,
) -> Algorithm:
    """Creates SCAFFOLD: control variates correct the drift of the clients' local steps.

    The server stores the variables of the model and, as `control`, the mean of all clients' control
    variates; clients download both and store `Client`.

    Args:
      server_rate: η_g, the learning rate of the server; 1 replaces the model by the mean of the
        clients' models.
    """
    require_above("scaffold.server_rate", server_rate, 0)
    base = fedavg(model, training, federation)
    clients = int(federation.active.sum())

    def model_of(tree: PyTree) -> PyTree:
        return {name: part for name, part in tree.items() if not name.startswith("control")}

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        zeros = jax.tree.map(jnp.zeros_like, state.server["params"])
        rows = initial_client_rows(zeros, start, Client, "control", federation)
        # A group of clients may have none that trains: its newcomers come in a later phase.
        active = jnp.asarray(federation.active, jnp.float32)
        control = trees.weighted_mean(rows, active) if clients else zeros
        return State({**state.server, "control": control}, (), Client(rows, state.clients))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        gradient = local_training.gradient(model, federation.task, ctx.data)

        def corrected(y: PyTree, carry: Any, batch: Batch, key: jax.Array) -> Any:
            """Returns ((loss, new carry), corrected gradient).

            `carry` is (model state, sum of plain gradients, number of steps).
            """
            model_state, total, steps = carry
            (loss, model_state), grads = gradient(y, model_state, batch, key)
            total = jax.tree.map(jnp.add, total, trees.at_least_float32(grads))
            carry = model_state, total, steps + 1
            direction = jax.tree.map(
                lambda g, c_i, c: g - c_i + c, grads, client.control, payload["control"]
            )
            return (loss, carry), direction

        x, model_state = local_training.split_variables(model_of(payload))
        zeros = trees.at_least_float32(jax.tree.map(jnp.zeros_like, x))
        carry = model_state, zeros, jnp.zeros((), jnp.float32)
        y, (model_state, total, steps), momentum, metrics = local_training.fit(
            training, corrected, x, carry, client.momentum, ctx
        )
        mean = jax.tree.map(lambda g: g / jnp.maximum(steps, 1.0).astype(g.dtype), total)
        control = trees.where(steps > 0, trees.with_dtypes(mean, x), client.control)
        variables = {"params": y, **model_state}
        control_change = jax.tree.map(jnp.subtract, control, client.control)
        return ClientResult(
            upload={**variables, "control_change": control_change},
            variables=variables,
            client=Client(control, momentum),
            metrics=metrics,
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

    return base._replace(init=init, train=train, receive=receive, personalize=personalize)


SCAFFOLD = Method(scaffold, title="SCAFFOLD", paper="Karimireddy et al. 2020")
