"""FedEM: every client is a mixture of the same M models, with its own weights.

Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions, 2021. With ℓ_m the
loss of component m, θ_m the downloaded models and π the client's stored weights:

  q_jm ∝ π_m exp(−ℓ_m(x_j, y_j)); π_m ← mean_j q_jm               over its training examples j
  θ_m ← SGD on mean_j q_jm ℓ_m(x_j, y_j); θ_m ← Σ_k n_k θ_km / Σ_k n_k
  output: Σ_m π_m softmax_m(x)

Deviations: the means of θ_m are over the clients that returned an update; the authors' code also
counts the others, with the last θ_m, which makes the server's step smaller if clients are sampled.
q is computed for each batch, from the downloaded models, with the same result. These models use
BatchNorm's running statistics.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_momentum, initial_variables
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.core import batches, local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.diagnostics import (
    MINIMAL_CHANGE,
    Diagnostic,
    Picture,
    below,
    entropy_bits,
    of_array,
)
from fedjax_pfl.core.errors import UsageError, require_at_least
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.core.metrics import mask_logits
from fedjax_pfl.networks.pretrained import require_random_start
from fedjax_pfl.networks.zero_head import require_random_copies


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    pi: jax.Array  # [M], the client's weights of the M models; the sum is 1
    momentum: PyTree  # optimiser state of all components, or () if not kept


@dataclasses.dataclass(frozen=True)
class Mixture:
    """M networks as one network, whose outputs are log-probabilities of their mixture."""

    network: Any  # the network of one component

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """Returns log Σ_m π_m softmax_m(x) over the client's classes, [B, C].

        Args:
          variables: `components`, stacked variables of the M networks; `pi` [M]; `classes`, bool
            [C] or None, the classes of the client.
          x: Examples.
        """
        outputs = jax.vmap(lambda component: self.network.apply(component, x))(
            variables["components"]
        )
        outputs = mask_logits(outputs, variables.get("classes"))
        log_probabilities = jax.nn.log_softmax(outputs) + jnp.log(variables["pi"])[:, None, None]
        return jax.nn.logsumexp(log_probabilities, 0)


def responsibilities(losses: jax.Array, pi: jax.Array) -> jax.Array:
    """Returns the probability of each component for each example, [M, B].

    `losses` of the components have the same shape; `pi` [M] are the client's weights.
    """
    return jax.nn.softmax(jnp.log(pi)[:, None] - losses, 0)


DIAGNOSTICS = {
    "share_bits": Diagnostic(
        meaning="entropy of a client's weights π in bits, mean over clients",
        value=of_array("pi", lambda pi: entropy_bits(pi).mean()),
    ),
    "deviation": Diagnostic(
        meaning="standard deviation of π over clients, mean over components",
        value=of_array("pi", lambda pi: np.asarray(pi, np.float64).std(0).mean()),
        inactive=below(MINIMAL_CHANGE),
        warning="all clients weigh the components equally: the standard deviation of π is "
        "{value:.5f}; see fedem.components",
    ),
}
PICTURES = {"pi": Picture("Weights, π", "weight of each component for each client", "component")}


def fedem(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    components: int = 3,
) -> Algorithm:
    """Creates FedEM, for classification: each client mixes the same M models with its own weights.

    The server stores M models, leaves of shape [M, ...], with different initial values. Clients
    store `Client`. A later phase, a part of a run with one algorithm, starts only from a state of
    FedEM: M copies of one model would stay equal.

    Args:
      components: M, the number of models that each client mixes; 1 is FedAvg.
    """
    require_at_least("fedem.components", components, 1)
    require_random_start("fedem", model)  # copies of one model would stay copies
    require_random_copies("fedem", model, model.layers)
    if not federation.task.has_classes:
        raise UsageError("fedem mixes probabilities of classes; choose a dataset with classes")
    base = training.optimizer
    per_component = optax.GradientTransformation(jax.vmap(base.init), jax.vmap(base.update))
    separate = training.with_optimizer(per_component)

    def init(key: jax.Array, start: State | None = None) -> State:
        initialise = partial(initial_variables, model, federation, start=None)
        server = jax.vmap(initialise)(jax.random.split(key, components))
        pi = jnp.full((federation.clients, components), 1 / components, jnp.float32)
        if start is not None:
            if not isinstance(start.clients, Client) or not trees.same_shapes(
                (server, pi), (start.server, start.clients.pi)
            ):
                raise UsageError(
                    "a phase of fedem can only start from fedem with the same network and "
                    "components; copies of one model would stay copies"
                )
            server, pi = start.server, start.clients.pi
        return State(
            server, (), Client(pi, initial_momentum(separate, server["params"], federation))
        )

    def losses(server: PyTree, batch: Batch, data: ClientData) -> jax.Array:
        """Returns the loss of each model in `server` for each example, [M, B], without dropout."""
        outputs = jax.vmap(lambda component: model.apply(component, batch.x))(server)
        return jax.vmap(lambda out: federation.task.loss(out, batch.y, data.classes))(outputs)

    def weigh(server: PyTree, pi: jax.Array, data: ClientData) -> jax.Array:
        """Returns new weights [M] from the client's weights `pi` and its training examples."""

        def sum_q(batch: Batch) -> jax.Array:
            q = responsibilities(losses(server, batch, data), pi)
            return jnp.sum(jnp.where(batch.mask, q, 0.0), 1)

        sums = batches.sum_batches(sum_q, data, data.train, training.batch_size)
        return jnp.where(data.train.size > 0, sums / jnp.maximum(jnp.sum(sums), 1e-9), pi)

    def mixture(server: PyTree, pi: jax.Array, data: ClientData) -> PyTree:
        return {"components": server, "pi": pi, "classes": data.classes}

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        data = ctx.data

        def weighted_gradient(
            params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array
        ) -> Any:
            q = responsibilities(losses(payload, batch, data), client.pi)

            def component_gradient(
                params: PyTree, model_state: PyTree, q: jax.Array, key: jax.Array
            ) -> Any:
                def weighted_loss(outputs: jax.Array, y: jax.Array, classes: Any) -> jax.Array:
                    return federation.task.loss(outputs, y, classes) * q

                gradient = local_training.gradient(
                    model, federation.task._replace(loss=weighted_loss), data
                )
                return gradient(params, model_state, batch, key)

            keys = jax.random.split(key, components)
            (loss, model_state), grads = jax.vmap(component_gradient)(params, model_state, q, keys)
            return (jnp.sum(loss), model_state), grads

        trained, momentum, metrics = fit_variables(
            separate, weighted_gradient, payload, client.momentum, ctx
        )
        pi = weigh(payload, client.pi, data)
        return ClientResult(
            upload=trained,
            variables=mixture(trained, pi, data),
            client=Client(pi, momentum),
            metrics=metrics,
        )

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        pi = client.pi
        if not federation.trained.all():  # a held-out client has had no round to learn its weights
            held_out_pi = weigh(state.server, pi, ctx.data)
            pi = jnp.where(jnp.asarray(federation.trained)[ctx.i], pi, held_out_pi)
        return mixture(state.server, pi, ctx.data)

    def observe(state: State) -> dict[str, jax.Array]:
        return {"pi": state.clients.pi}

    return fedavg(model, training, federation)._replace(
        init=init,
        train=train,
        personalize=personalize,
        predict=Mixture(model).apply,
        observe=observe,
    )


FEDEM = Method(
    fedem, title="FedEM", paper="Marfoq et al. 2021", diagnostics=DIAGNOSTICS, pictures=PICTURES
)
