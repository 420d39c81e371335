"""FedProto: clients share what each class looks like to them, and no model.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, 2022. With z_i(x)
what comes into client i's head, d numbers:

  θ_i ← θ_i − η ∇(f_i + λ mean_x ‖z_i(x) − C_y‖²/d), over the batch, from its own last model
  C_ic = mean of z_i(x) over its examples of class c, after training
  C_c ← Σ_k n_kc C_kc / Σ_k n_kc, over those that arrived and have the class; else it stays
A client is served its model, which takes x for the class whose C_c is nearest to z_i(x).

Deviations: the mean of prototypes is weighted by their examples; the paper's equation divides by
the number of clients once more, and the authors' code has the plain mean. Examples of a class that
has no prototype yet have no second term, as in the authors' code. Before there is any prototype
the head decides. All clients have the same network here.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.local import Client, local
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Cohort, Federation, PyTree, State, Trained, Visit
from fedjax_pfl.core.errors import UsageError, at_least, one_of
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks import features

DECIDERS = ("prototype", "head")


@dataclasses.dataclass(frozen=True)
class Nearest:
    """A network whose logits are −‖z − C_c‖²; its own where there is no prototype yet."""

    network: Any

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """Of the network's variables with `prototypes` [C, d] and `seen` [C] beside them."""
        outputs, z = features.WithFeatures(self.network).apply(_network_of(variables), x)
        gaps = z[:, None] - variables["prototypes"][None]
        near = jnp.where(variables["seen"][None], -jnp.sum(jnp.square(gaps), -1), -1e9)
        return jnp.where(jnp.any(variables["seen"]), near, outputs)


def _network_of(variables: PyTree) -> PyTree:
    return {name: tree for name, tree in variables.items() if name not in ("prototypes", "seen")}


def fedproto(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 1.0,
    decides: str = "prototype",
) -> Algorithm:
    """With λ = 0 its models are Local's. Server: C, and which classes it has. Clients: Local's.

    Args:
      penalty: λ, how firmly what comes into the head is held near the prototype of its class.
      decides: by what a client's model is evaluated: the nearest prototype, or its head.
    """
    at_least("fedproto.penalty", penalty, 0)
    one_of("fedproto.decides", decides, DECIDERS)
    if not task.has_classes:
        raise UsageError("fedproto makes a prototype of each class; choose a dataset with classes")
    classes, d = federation.outputs, features.width("fedproto", model, federation)
    both = features.WithFeatures(model)
    alone = local(model, task, training, federation)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = alone.init(key, start)
        return state._replace(server=common.no_prototypes(classes, d))

    def send(state: State, visit: Visit) -> PyTree:
        return state.server

    def served(own: PyTree, prototypes: PyTree) -> PyTree:
        return {**own, **prototypes} if decides == "prototype" else own

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        data = visit.data
        pulled = common.near_prototypes(task, payload, penalty)
        gradient = local_training.gradient(both, pulled, data)
        params, rest, momentum, metrics = local_training.fit(
            training, gradient, *local_training.split_variables(client.variables),
            client.momentum, visit,
        )  # fmt: skip
        own = {"params": params, **rest}
        there = common.features_by_class(both, own, data, classes)
        upload = {"prototypes": there.means, "counts": there.counts}
        return Trained(upload, served(own, payload), Client(own, momentum), metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return common.new_prototypes(state.server, cohort.present(cohort.uploads)), state.rows

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        return served(client.variables, state.server)

    def observe(state: State) -> dict[str, jax.Array]:
        return {"prototypes": state.server["prototypes"]}

    predict = Nearest(model).apply if decides == "prototype" else model.apply
    return Algorithm(init, send, train, receive, personal, predict, observe=observe)
