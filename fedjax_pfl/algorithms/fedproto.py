"""FedProto: clients share the mean features of each class, its prototype, and no model.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, 2022. z_i(x) are
the d features that client i's network computes for its head:

  θ_i ← θ_i − η ∇(f_i + λ mean_x ‖z_i(x) − C_y‖²/d), over the batch, from client i's last model
  C_ic = mean of z_i(x) over the client's examples of class c, after training
  C_c ← Σ_k n_kc C_kc / Σ_k n_kc, over the clients that returned one; unchanged if none did
Each client keeps its own model, which predicts the class whose C_c is nearest to z_i(x).

Deviations: the paper penalises the distance of a client's class prototypes to C_c; here, as in the
authors' code, the penalty is the mean over examples. The mean of prototypes is weighted by their
examples; the paper's equation also divides by the number of clients, and the authors' code takes
the unweighted mean. Examples of a class without a prototype have no penalty, as in the authors'
code. All clients of a network start equal; on MNIST and FEMNIST in the authors' code each starts at
random. The trained model computes prototypes in evaluation mode; their code averages features
during the last epoch. They predict among the client's own classes, here among all. A class without
a prototype is farther by 1 than the farthest prototype, so it is never predicted and its loss stays
finite. The head predicts until the first prototype exists. A client uploads a row for every class,
zeros for those that it lacks, and the traffic counts them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.local import LocalClient, local
from fedjax_pfl.algorithms.shared.class_features import class_features
from fedjax_pfl.algorithms.shared.initial_state import continuing
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.algorithms.shared.prototypes import (
    average_prototypes,
    means_or_prototypes,
    no_prototypes,
    with_prototype_penalty,
)
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
from fedjax_pfl.core.diagnostics import Picture
from fedjax_pfl.core.errors import UsageError, require_at_least, require_one_of
from fedjax_pfl.core.groups import share_server
from fedjax_pfl.networks import features

DECIDERS = ("prototype", "head")


@dataclasses.dataclass(frozen=True)
class Nearest:
    """A network with logits −‖z − C_c‖² for features z and the prototype C_c of class c.

    A class without a prototype gets -(largest distance + 1). Until the first prototype exists, the
    outputs of the head are returned.
    """

    network: Any  # the plain network

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """Returns logits [B, C].

        Args:
          variables: Those of the plain network, with `prototypes` [C, d], the mean features of
            each class, and `seen`, bool [C], True for the classes that have one.
          x: Examples.
        """
        outputs, z = features.WithFeatures(self.network).apply(_network_of(variables), x)
        has_prototype = variables["seen"][None]
        distances = jnp.sum(jnp.square(z[:, None] - variables["prototypes"][None]), -1)
        farthest = jnp.max(distances, -1, keepdims=True, where=has_prototype, initial=0.0)
        logits = -jnp.where(has_prototype, distances, farthest + 1)
        return jnp.where(jnp.any(has_prototype), logits, outputs)


def _network_of(variables: PyTree) -> PyTree:
    return {name: tree for name, tree in variables.items() if name not in ("prototypes", "seen")}


def fedproto(
    models: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 1.0,
    decides: str = "prototype",
) -> Algorithm:
    """Creates FedProto, for classification: clients share class means of features, and no model.

    A penalty pulls features to them. With λ = 0 clients train the same models as with Local.
    `models` is a network, or a tuple with one for each group of clients, whose features have the
    same length. The server stores the prototypes, the mean features of each class, and which
    classes have one; clients store the same as Local.

    Args:
      penalty: λ, the weight of the distance between an example's features and its prototype.
      decides: What predicts when a client's model is evaluated: the nearest prototype or its head.
    """
    require_at_least("fedproto.penalty", penalty, 0)
    require_one_of("fedproto.decides", decides, DECIDERS)
    if not federation.task.has_classes:
        raise UsageError("fedproto makes a prototype of each class; choose a dataset with classes")
    d = features.common_width("fedproto", models, federation)
    classes = federation.outputs

    def for_network(model: Any) -> Algorithm:
        with_features = features.WithFeatures(model)
        base = local(model, training, federation)

        def init(key: jax.Array, start: State | None = None) -> State:
            state = base.init(key, start)
            return state._replace(server=no_prototypes(classes, d))

        def send(state: State, ctx: ClientContext) -> PyTree:
            return state.server

        def served(variables: PyTree, prototypes: PyTree) -> PyTree:
            return {**variables, **prototypes} if decides == "prototype" else variables

        def train(payload: PyTree, client: LocalClient, ctx: ClientContext) -> ClientResult:
            task = with_prototype_penalty(federation.task, payload, penalty)
            gradient = local_training.gradient(with_features, task, ctx.data)
            variables, momentum, metrics = fit_variables(
                training, gradient, client.variables, client.momentum, ctx
            )
            statistics = class_features(with_features, variables, ctx.data, classes)
            return ClientResult(
                upload={
                    "prototypes": means_or_prototypes(statistics, payload),
                    "counts": statistics.counts.astype(jnp.int32),
                },
                variables=served(variables, payload),
                client=LocalClient(variables, momentum),
                metrics=metrics,
            )

        def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
            return average_prototypes(state.server, cohort.present(cohort.uploads)), state.rows

        def personalize(state: State, client: LocalClient, ctx: ClientContext) -> PyTree:
            return served(client.variables, state.server)

        def observe(state: State) -> dict[str, jax.Array]:
            return {"prototypes": state.server["prototypes"]}

        predict = Nearest(model).apply if decides == "prototype" else model.apply
        return base._replace(
            init=continuing(init),
            send=send,
            train=train,
            receive=receive,
            personalize=personalize,
            predict=predict,
            observe=observe,
        )

    return share_server(models, for_network)


FEDPROTO = Method(
    fedproto,
    title="FedProto",
    paper="Tan et al. 2022",
    pictures={"prototypes": Picture("Prototypes", "the mean feature of each class", "feature")},
)
