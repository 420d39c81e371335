"""FedGH: the server trains one head for all clients on their class means of features.

Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header, 2023. Client i
has its own body φ_i, of any architecture; all have the same linear head H:

  (φ_i, H_i) ← (φ_i, H) − η ∇ f_i, in every local step
  C_ic = mean of φ_i(x) over the client's examples of class c, after training
  H ← H − η_s ∇ ℓ(H(C_ic), c), for one client and one of its classes after the other
A client is served (φ_i, H).

Deviations: the loss ℓ is the cross-entropy. The server takes clients in the order of their numbers,
with several networks one group after the other. The authors' code takes them in a random order, and
PFLlib's shuffles the means of all clients into batches. A client uploads a row for every class,
zeros for those that it lacks, and the traffic counts them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.local import LocalClient, local
from fedjax_pfl.algorithms.shared.class_features import class_features
from fedjax_pfl.algorithms.shared.initial_state import (
    continuing,
    initial_momentum,
    initial_variables,
)
from fedjax_pfl.algorithms.shared.linear_head import (
    head_layer,
    head_variables,
    linear_head_width,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require_at_least
from fedjax_pfl.core.groups import share_server
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.networks import features


def fedgh(
    models: Any,
    training: Training,
    federation: Federation,
    *,
    rate: float = 0.01,
) -> Algorithm:
    """Creates FedGH, for classification: own bodies, and one head that the server trains.

    `models` is a network, or a tuple with one for each group of clients; their heads have the same
    shape. The server stores the variables of the head, clients store `LocalClient` with those of
    the body.

    Args:
      rate: η_s, the learning rate of the head on the server.
    """
    require_at_least("fedgh.rate", rate, 0)
    if not federation.task.has_classes:
        raise UsageError("fedgh averages the features of each class; choose a dataset with classes")
    d = features.common_width("fedgh", models, federation)
    classes = federation.outputs

    def train_head(head: PyTree, means: jax.Array, sent: jax.Array) -> PyTree:
        """Returns new {"kernel", "bias"} after a step for each of the means [K, C, d] in `sent`."""

        def step(head: PyTree, example: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            z, label, exists = example

            def loss(head: PyTree) -> jax.Array:
                return -jax.nn.log_softmax(z @ head["kernel"] + head.get("bias", 0.0))[label]

            moved = jax.tree.map(lambda p, g: p - rate * g, head, jax.grad(loss)(head))
            return trees.where(exists, moved, head), None

        labels = jnp.tile(jnp.arange(classes), len(means))
        examples = (means.reshape(-1, d), labels, sent.reshape(-1))
        return jax.lax.scan(step, head, examples)[0]

    def for_network(model: Any) -> Algorithm:
        base = local(model, training, federation)
        train_model = model_trainer(model, federation.task, training)
        with_features = features.WithFeatures(model)
        linear_head_width("fedgh", model, federation)

        def init(key: jax.Array, start: State | None = None) -> State:
            variables = initial_variables(model, federation, key, start)
            momentum = initial_momentum(training, variables["params"], federation)
            head, body = trees.split(variables, {model.head})
            return State(
                server=head_layer(model, head),
                rows=(),
                clients=LocalClient(trees.repeat(body, federation.clients), momentum),
            )

        def send(state: State, ctx: ClientContext) -> PyTree:
            return state.server

        def joined(head: PyTree, body: PyTree) -> PyTree:
            return trees.join(head_variables(model, head), body)

        def train(payload: PyTree, client: LocalClient, ctx: ClientContext) -> ClientResult:
            start = joined(payload, client.variables)
            variables, momentum, metrics = train_model(start, client.momentum, ctx)
            statistics = class_features(with_features, variables, ctx.data, classes)
            _, body = trees.split(variables, {model.head})
            return ClientResult(
                upload={"means": statistics.means, "counts": statistics.counts.astype(jnp.int32)},
                variables=variables,
                client=LocalClient(body, momentum),
                metrics=metrics,
            )

        def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
            uploads = cohort.present(cohort.uploads)
            return train_head(state.server, uploads["means"], uploads["counts"] > 0), state.rows

        def personalize(state: State, client: LocalClient, ctx: ClientContext) -> PyTree:
            return joined(state.server, client.variables)

        return base._replace(
            init=continuing(init), send=send, train=train, receive=receive, personalize=personalize
        )

    return share_server(models, for_network)


FEDGH = Method(fedgh, title="FedGH", paper="Yi et al. 2023")
