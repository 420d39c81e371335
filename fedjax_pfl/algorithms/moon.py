"""MOON: features of a client stay near the global model's and away from its previous model's.

Li et al., Model-Contrastive Federated Learning, 2021. z_w(x) are the features that network w
computes for its head, w is the downloaded model, and v_k the client's model after its last round:

  s(x) = cos(z_{w_k}(x), z_w(x)),   s'(x) = cos(z_{w_k}(x), z_{v_k}(x))
  w_k ← w_k − η ∇(f(w_k; B) + μ mean_x log(1 + exp((s'(x) − s(x))/τ))), from w;   v_k ← w_k
  w ← Σ_k n_k w_k / Σ_k n_k: FedAvg

Deviations: z are the inputs of the network's head; the paper adds two layers before the head whose
outputs are z, which a network of your own can have. w and v_k compute features in evaluation mode,
as in the authors' code. Before a client's first round v_k is the initial model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require_above, require_at_least
from fedjax_pfl.networks import features

_EPSILON = 1e-8  # least product of two norms, which is 0 if all features are


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    previous: PyTree  # variables of its model after its last round; initially the global model
    momentum: PyTree  # optimiser state, or () if clients do not keep it


class WithReferences(NamedTuple):
    """The network for training. Returns outputs, its features and those of the reference models."""

    network: features.WithFeatures  # the network that is trained
    references: tuple[PyTree, ...]  # variables of each reference model, constants

    def apply(self, variables: PyTree, x: jax.Array, **options: Any) -> Any:
        """Returns ((outputs, features, references' features), collections that training updates).

        Features are [B, d]; the references' are a tuple of such arrays, in evaluation mode.
        """
        (outputs, z), updated = self.network.apply(variables, x, **options)
        fixed = tuple(self.network.apply(reference, x)[1] for reference in self.references)
        return (outputs, z, fixed), updated


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Cosine similarity of the rows of two arrays [B, d]; 0 if one of them is 0. Returns [B]."""
    squares = jnp.sum(jnp.square(a), -1) * jnp.sum(jnp.square(b), -1)
    return jnp.sum(a * b, -1) / jnp.sqrt(jnp.maximum(squares, _EPSILON**2))


def moon(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    mu: float = 1.0,
    temperature: float = 0.5,
) -> Algorithm:
    """Creates MOON: FedAvg with a contrastive loss on the features.

    The loss keeps them near the global model's and away from features of the client's previous
    model. The server stores the same as FedAvg, clients store `Client`.

    Args:
      mu: μ, the weight of the contrastive loss; 0 is FedAvg.
      temperature: τ, which divides the cosines.
    """
    require_at_least("moon.mu", mu, 0)
    require_above("moon.temperature", temperature, 0)
    features.width("moon", model, federation)
    base = fedavg(model, training, federation)

    def loss(outputs: Any, y: jax.Array, classes: Any) -> jax.Array:
        logits, z, (z_global, z_previous) = outputs
        difference = cosine(z, z_previous) - cosine(z, z_global)
        contrast = jax.nn.softplus(difference / temperature)
        return federation.task.loss(logits, y, classes) + mu * contrast

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        previous = initial_client_rows(state.server, start, Client, "previous", federation)
        return state._replace(clients=Client(previous, state.clients))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        network = WithReferences(features.WithFeatures(model), (payload, client.previous))
        gradient = local_training.gradient(network, federation.task._replace(loss=loss), ctx.data)
        variables, momentum, metrics = fit_variables(
            training, gradient, payload, client.momentum, ctx
        )
        return ClientResult(
            upload=variables,
            variables=variables,
            client=Client(variables, momentum),
            metrics=metrics,
        )

    return base._replace(init=init, train=train)


MOON = Method(moon, title="MOON", paper="Li et al. 2021")
