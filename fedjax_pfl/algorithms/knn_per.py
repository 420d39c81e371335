"""kNN-Per: FedAvg's model, mixed at each client with the labels of similar training examples.

Marfoq et al., Personalized Federated Learning through Local Memorization, 2022. z(x) are the d
features that the client's model computes for its head. N(x) are the k training examples of the
client whose features z_j are nearest to z(x):

  w_k ← w_k − η ∇f(w_k; B), and w ← Σ_k n_k w_k / Σ_k n_k: FedAvg
  h_c(x) = Σ_{j in N(x), y_j = c} s_j / Σ_{j in N(x)} s_j,   s_j = exp(−‖z(x) − z_j‖²/(d σ))
  output: λ h(x) + (1 − λ) softmax(w; x)

Each client can select its λ on its validation examples, as in the paper: here among 0, 0.1,
..., 1 by the lowest loss. The authors' code reports a whole grid on test examples.

Deviations: by default λ is the same for all clients. The distance of features is the squared one
divided by d, as in the authors' code. All training examples are stored; the paper also studies
fewer. A client with fewer than k examples uses all of them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.class_features import example_features
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.validation import require_validation
from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require, require_above, require_at_least
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.networks import features

_WEIGHTS = tuple(i / 10 for i in range(11))  # the λ from which a client selects
_EPSILON = 1e-9  # least probability of a class, which is 0 if λ is 1 and no neighbour has it


@dataclasses.dataclass(frozen=True)
class NeighbourMixture:
    """A network mixed with the labels of stored examples, whose outputs are log-probabilities.

    The stored examples are part of the variables; see `memorise`.
    """

    network: Any  # the plain network
    neighbours: int  # k, number of nearest stored examples that a prediction reads
    weight: Any  # λ, the weight of their labels, or None if each client selects it
    scale: Any  # σ, which divides the distances of features

    def memorise(self, variables: PyTree, data: ClientData) -> PyTree:
        """Returns a network's variables with the client's training examples as `memory`.

        `memory` holds `features` [n, d], `labels` [n] and `stored`, bool [n], False for padding.
        The client's `classes`, bool [C] or None, and λ as `weight`, [1], are added too.
        """
        z, y, stored = example_features(self.network, variables, data)
        memory = {"features": z, "labels": y, "stored": stored}
        with_memory = {**variables, "memory": memory, "classes": data.classes}
        weight = self.select(with_memory, data) if self.weight is None else self.weight
        weight = jnp.where(jnp.any(stored), weight, 0.0)
        return {**with_memory, "weight": jnp.full(1, weight)}

    def select(self, variables: PyTree, data: ClientData) -> jax.Array:
        """Returns the λ, a multiple of 0.1, with the lowest loss on the validation examples, [].

        `variables` are those that `memorise` returns, without `weight`.
        """
        weights = jnp.asarray(_WEIGHTS)[:, None]

        def losses(batch: Batch) -> jax.Array:
            network, neighbours = (
                jnp.take_along_axis(probabilities, batch.y[:, None], 1).T
                for probabilities in self.parts(variables, batch.x)
            )
            mixture = weights * neighbours + (1 - weights) * network
            losses = -jnp.log(jnp.maximum(mixture, _EPSILON))
            return jnp.sum(jnp.where(batch.mask[None], losses, 0.0), 1)

        return weights[jnp.argmin(batches.sum_batches(losses, data, data.validation)), 0]

    def parts(self, variables: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the class probabilities of network and neighbours' labels, [B, C] each.

        `variables` are those that `memorise` returns; `weight` is not read.
        """
        memory, classes = variables["memory"], variables.get("classes")
        added = ("memory", "classes", "weight")
        network_variables = {name: v for name, v in variables.items() if name not in added}
        outputs, z = features.WithFeatures(self.network).apply(network_variables, x)
        if classes is not None:
            outputs = jnp.where(classes[None], outputs, -1e9)
        difference = z[:, None] - memory["features"][None]
        similarity = -jnp.mean(jnp.square(difference), -1) / self.scale
        # The nearest stored example has similarity 0, so that no padding is as near.
        stored = memory["stored"][None]
        most = jnp.max(similarity, 1, keepdims=True, initial=-jnp.inf, where=stored)
        similarity = jnp.where(stored, similarity - most, -1e9)
        nearest, places = jax.lax.top_k(similarity, min(self.neighbours, similarity.shape[1]))
        labels = jax.nn.one_hot(memory["labels"][places], outputs.shape[-1])
        shares = jax.nn.softmax(nearest)
        neighbours = jnp.einsum("bk,bkc->bc", shares, labels, precision="highest")
        return jax.nn.softmax(outputs), neighbours

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """Returns log-probabilities of classes, [B, C].

        Args:
          variables: Result of `memorise`.
          x: Examples.
        """
        network, neighbours = self.parts(variables, x)
        weight = variables["weight"][:, None]
        mixture = weight * neighbours + (1 - weight) * network
        return jnp.log(jnp.maximum(mixture, _EPSILON))


def knn_per(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    neighbours: int = 10,
    weight: float = 0.5,
    scale: float = 1.0,
    select_weight: bool = False,
) -> Algorithm:
    """Creates kNN-Per, for classification: FedAvg's model, mixed with labels of similar examples.

    Each client mixes in the labels of its own training examples. The state is that of FedAvg.

    Args:
      neighbours: k, the number of training examples that a prediction reads.
      weight: λ, the weight of their labels; 0 is FedAvg.
      scale: σ, which divides the distances; with a large one the neighbours have equal weights.
      select_weight: Whether each client replaces λ by the multiple of 0.1 with the lowest loss on
        its validation examples, which it then needs.
    """
    require_at_least("knn_per.neighbours", neighbours, 1)
    require((weight >= 0) & (weight <= 1), f"knn_per.weight is {weight}; it is a share, 0 to 1")
    if select_weight:
        require_validation("knn_per selects weights on", federation)
    require_above("knn_per.scale", scale, 0)
    if not federation.task.has_classes:
        raise UsageError("knn_per mixes probabilities of classes; choose a dataset with classes")
    features.width("knn_per", model, federation)
    base = fedavg(model, training, federation)
    mixture = NeighbourMixture(model, neighbours, None if select_weight else weight, scale)

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        result = base.train(payload, client, ctx)
        return result._replace(variables=mixture.memorise(result.variables, ctx.data))

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return mixture.memorise(state.server, ctx.data)

    return base._replace(train=train, personalize=personalize, predict=mixture.apply)


KNN_PER = Method(
    knn_per,
    title="kNN-Per",
    paper="Marfoq et al. 2022",
    tuning_note="with knn_per.select_weight, clients select their weights on validation examples, "
    "so its validation scores are too high",
)
