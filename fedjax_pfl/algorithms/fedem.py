"""FedEM: every client is a mixture of the same M models, with weights of its own.

Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions, 2021. With ℓ_m the
loss of component m, and θ_m, π as the client received and kept them:

  q_jm ∝ π_m exp(−ℓ_m(x_j, y_j)); π_m ← mean_j q_jm               over its training examples j
  θ_m ← SGD on mean_j q_jm ℓ_m(x_j, y_j); θ_m ← Σ_k n_k θ_km / Σ_k n_k
  output: Σ_m π_m softmax_m(x)

Deviations: q is computed anew for each batch from the models that came down, which is the same.
Those see BatchNorm's running statistics.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
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


class Client(NamedTuple):
    """What stays with each client."""

    pi: jax.Array  # [M]
    momentum: PyTree  # of all components


@dataclasses.dataclass(frozen=True)
class Mixture:
    """M networks as one."""

    network: Any

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """log Σ_m π_m softmax_m(x), over the client's own classes."""
        outputs = jax.vmap(lambda one: self.network.apply(one, x))(variables["components"])
        if (classes := variables.get("classes")) is not None:
            outputs = jnp.where(classes[None, None], outputs, -1e9)
        chances = jax.nn.log_softmax(outputs) + jnp.log(variables["pi"])[:, None, None]
        return jax.nn.logsumexp(chances, 0)


def responsibilities(losses: jax.Array, pi: jax.Array) -> jax.Array:
    """q [M, B] from the components' losses [M, B]."""
    return jax.nn.softmax(jnp.log(pi)[:, None] - losses, 0)


DIAGNOSTICS = {
    "share_bits": Diagnostic(
        meaning="entropy of a client's shares π of the components, in bits, the mean over clients",
        value=of_array("pi", lambda pi: entropy_bits(pi).mean()),
    ),
    "deviation": Diagnostic(
        meaning="deviation of π over clients, the mean over components",
        value=of_array("pi", lambda pi: np.asarray(pi, np.float64).std(0).mean()),
        inactive=below(MINIMAL_CHANGE),
        warning="all clients weigh the components alike: π deviates by {value:.5f} over them; see "
        "fedem.components",
    ),
}
PICTURES = {"pi": Picture("Shares, π", "each client's share of a component", "component")}


def fedem(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    components: int = 3,
) -> Algorithm:
    """Server: M models, [M, ...], different from the start. Clients: `Client`. Classes only.

    A phase starts from a state of its own kind: M copies of one model would stay copies.

    Args:
      components: M, how many models each client mixes; 1 is FedAvg.
    """
    require_at_least("fedem.components", components, 1)
    if not federation.task.has_classes:
        raise UsageError("fedem mixes probabilities of classes; choose a dataset with classes")
    step = training.optimizer
    each = optax.GradientTransformation(jax.vmap(step.init), jax.vmap(step.update))
    apart = training._replace(optimizer=each)

    def init(key: jax.Array, start: State | None = None) -> State:
        draw = partial(common.initial, model, federation, start=None)
        server = jax.vmap(draw)(jax.random.split(key, components))
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
        return State(server, (), Client(pi, common.kept(apart, server["params"], federation)))

    def losses(server: PyTree, batch: Batch, data: ClientData) -> jax.Array:
        """[M, B], as served."""
        outputs = jax.vmap(lambda one: model.apply(one, batch.x))(server)
        return jax.vmap(lambda out: federation.task.loss(out, batch.y, data.classes))(outputs)

    def weigh(server: PyTree, pi: jax.Array, data: ClientData) -> jax.Array:
        """The new π, from one pass over the training examples."""

        def one(batch: Batch) -> jax.Array:
            q = responsibilities(losses(server, batch, data), pi)
            return jnp.sum(jnp.where(batch.mask, q, 0.0), 1)

        sums = batches.sum_batches(one, data, data.train, training.batch_size)
        return jnp.where(data.train.size > 0, sums / jnp.maximum(jnp.sum(sums), 1e-9), pi)

    def mixture(server: PyTree, pi: jax.Array, data: ClientData) -> PyTree:
        return {"components": server, "pi": pi, "classes": data.classes}

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        data = ctx.data

        def weighted(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
            q = responsibilities(losses(payload, batch, data), client.pi)

            def one(params: PyTree, rest: PyTree, q: jax.Array, key: jax.Array) -> Any:
                def by_q(outputs: jax.Array, y: jax.Array, classes: Any) -> jax.Array:
                    return federation.task.loss(outputs, y, classes) * q

                gradient = local_training.gradient(model, federation.task._replace(loss=by_q), data)
                return gradient(params, rest, batch, key)

            keys = jax.random.split(key, components)
            (loss, rest), grads = jax.vmap(one)(params, rest, q, keys)
            return (jnp.sum(loss), rest), grads

        params, rest = local_training.split_variables(payload)
        params, rest, momentum, metrics = local_training.fit(
            apart, weighted, params, rest, client.momentum, ctx
        )
        trained = {"params": params, **rest}
        pi = weigh(payload, client.pi, data)
        return ClientResult(trained, mixture(trained, pi, data), Client(pi, momentum), metrics)

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        pi = client.pi
        if not federation.active.all():  # a novel client has had no round to find its weights in
            found = weigh(state.server, pi, ctx.data)
            pi = jnp.where(jnp.asarray(federation.active)[ctx.i], pi, found)
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
