"""PeFLL: an embedding network describes a client's examples, a hypernetwork makes its model of it.

Scott et al., PeFLL: Personalized Federated Learning by Learning to Learn, 2024. E(x, y; ψ) is the
embedding network, h(·; φ) the hypernetwork. Each round of client i, with a batch B of its examples:

  v_i = mean of E(x, y; ψ) over B;   θ_i = h(v_i; φ);   θ̃_i = local training from θ_i
  g_φ = (∂θ_i/∂φ)ᵀ (θ_i − θ̃_i),   g_ψ = (∂v_i/∂ψ)ᵀ (∂θ_i/∂v_i)ᵀ (θ_i − θ̃_i)
  (φ, ψ) ← Adam on the mean of (g_φ, g_ψ) over clients, clipped, plus λ (φ, ψ)

A client is served h(v_i; φ), with v_i the mean over all of its training examples. So a client that
never trained also gets a model of its own.

In the paper a round has three exchanges, and φ stays on the server: a client downloads ψ, θ_i and
the gradient of v_i, and uploads v_i, θ_i − θ̃_i and g_ψ. Here a round has one exchange, with equal
results: a client downloads ψ and φ and computes θ_i itself. Uploads are those of the paper; the
server computes g_φ. So the download is larger, by φ − θ_i − v_i, and that is the traffic counted.

Deviations: E is fully connected, for examples of any shape, with labels weighted as much as x; the
paper's is a LeNet for images. The authors' code subtracts the mean of the first descriptor from all
and divides by its standard deviation; here the initialisation of E gives them such a scale.
Clipping and Adam are as in the authors' code. Its local steps have a weight decay of 5e-5, the
paper's penalty on θ, here a setting of training. λ is 0 by default, because its Adam ignores the
value that is set. In evaluation it multiplies the logits of a client's absent classes by 0; here
they are kept. BatchNorm statistics stay on the clients.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.algorithms.pfedhn.diagnostics import PICTURES, diagnostics
from fedjax_pfl.algorithms.pfedhn.hypernet import Hypernetwork, spread
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.core import batches, local_training, optimizers, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.diagnostics import Observed, Picture, Value
from fedjax_pfl.core.errors import (
    MAX_LAYERS,
    UsageError,
    require,
    require_above,
    require_at_least,
)
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.networks.pretrained import require_random_start
from fedjax_pfl.networks.zero_head import require_random_head


class Server(NamedTuple):
    """State that all clients share."""

    embedding: PyTree  # ψ, parameters of the embedding network
    hypernetwork: PyTree  # φ, parameters of the hypernetwork
    moments: PyTree  # optimiser state of both


class Rows(NamedTuple):
    """State that the server keeps for each client, stacked over clients; only for reports."""

    descriptor: jax.Array  # v_i of the client's latest round, [N, l]; 0 before the first


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    statistics: PyTree  # collections that are not generated, such as BatchNorm statistics
    momentum: PyTree  # optimiser state, or () if clients do not keep it


class EmbeddingNetwork(nn.Module):
    """An MLP with ReLU that maps examples x [B, ...] and labels y [B, labels] to vectors [B, l].

    x and y have equal weight at first, and outputs about the scale of x. With depth 0 it is linear.
    """

    outputs: int  # l
    width: int
    depth: int  # hidden layers

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns outputs [B, l]."""
        widths = [self.width] * self.depth + [self.outputs]
        x = x.reshape(x.shape[0], -1)
        x = nn.Dense(widths[0], name="fc1")(x) + nn.Dense(widths[0], use_bias=False, name="labels")(
            y
        )
        for i, width in enumerate(widths[1:]):
            layer = nn.Dense(width, kernel_init=nn.initializers.he_normal(), name=f"fc{i + 2}")
            x = layer(nn.relu(x))
        return x


def pefll(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    rate: float = 2e-4,
    clip_norm: float = 50.0,
    weight_decay: float = 0.0,
    descriptor: int | None = None,
    examples: int = 32,
    embedding_width: int = 100,
    embedding_depth: int = 2,
    width: int = 100,
    depth: int = 3,
) -> Algorithm:
    """Creates PeFLL: a network describes each client, and a hypernetwork makes its model.

    Both are trained on the server together. The server stores `Server` and `Rows`, clients store
    `Client`. Raises UsageError for sequences.

    Args:
      rate: Learning rate of Adam for both networks.
      clip_norm: Largest norm of their gradient.
      weight_decay: λ, the weight decay of both networks.
      descriptor: l, the length of a descriptor. Unset: 1 + N // 4 for N clients.
      examples: Number of training examples that a descriptor is computed from in a
        round. For evaluation it is computed from all.
      embedding_width: Units of each hidden layer of the embedding network.
      embedding_depth: Number of hidden layers of the embedding network.
      width: Units of each layer of the hypernetwork before its heads; 0 for none of these layers.
      depth: Number of hidden layers of the hypernetwork.
    """
    for name, value in {"rate": rate, "clip_norm": clip_norm}.items():
        require_above(f"pefll.{name}", value, 0)
    for name, value in {"weight_decay": weight_decay, "width": width}.items():
        require_at_least(f"pefll.{name}", value, 0)
    lengths = {"descriptor": descriptor, "examples": examples}
    for name, length in {**lengths, "embedding_width": embedding_width}.items():
        require_at_least(f"pefll.{name}", length, 1)
    for name, layers in {"depth": depth, "embedding_depth": embedding_depth}.items():
        require(0 <= layers <= MAX_LAYERS, f"pefll.{name} is {layers}; choose 0 to {MAX_LAYERS}")
    if federation.input_dtype != "float32" or federation.positions:
        raise UsageError("pefll describes vectors and images; choose a dataset without sequences")
    require_random_start("pefll", model)
    require_random_head("pefll", model)
    n, task = federation.clients, federation.task
    length = descriptor or 1 + n // 4
    embedding_network = EmbeddingNetwork(length, embedding_width, embedding_depth)
    target = local_training.split_variables(model_shapes(model, federation))[0]
    hypernetwork = Hypernetwork(target=target, width=width, depth=depth)
    train_model = model_trainer(model, task, training)
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.add_decayed_weights(weight_decay),
        optimizers.with_dtype_promotion(optax.adam(rate)),
    )

    def described(embedding: PyTree, batch: Batch) -> jax.Array:
        """Returns the sum of E(x, y; ψ) over a batch, [l]."""
        c = federation.outputs
        # √C gives the entries of a one-hot vector a mean square of 1.
        y = jax.nn.one_hot(batch.y, c) * jnp.sqrt(c * 1.0) if task.has_classes else batch.y
        vectors: Any = embedding_network.apply(
            {"params": embedding}, batch.x, y.astype(jnp.float32)
        )
        return jnp.sum(jnp.where(batch.mask[:, None], vectors, 0.0), 0)

    def of_batch(embedding: PyTree, batch: Batch) -> jax.Array:
        """Returns the descriptor of a batch, [l]."""
        size = jnp.sum(batch.mask).astype(jnp.float32)
        return described(embedding, batch) / jnp.maximum(size, 1.0)

    def of_client(embedding: PyTree, data: ClientData) -> jax.Array:
        """Returns the descriptor of all training examples of a client, [l]."""
        total = batches.sum_batches(lambda batch: described(embedding, batch), data, data.train)
        return total / jnp.maximum(data.train.size.astype(jnp.float32), 1.0)

    def generate(phi: PyTree, v: jax.Array) -> Any:
        """Returns h(v; φ), the parameters of a model."""
        return hypernetwork.apply({"params": phi}, v)

    def init(key: jax.Array, start: State | None = None) -> State:
        psi_key, phi_key, model_key = jax.random.split(key, 3)
        labels = jnp.zeros((1, federation.outputs))
        psi = embedding_network.init(psi_key, federation.examples(), labels)["params"]
        phi = hypernetwork.init(phi_key, jnp.zeros(length))["params"]
        networks = {"embedding": psi, "hypernetwork": phi}
        params, statistics = local_training.split_variables(
            initial_variables(model, federation, model_key, None)
        )
        rows, stacked = Rows(jnp.zeros((n, length))), trees.repeat(statistics, n)
        if start is not None:
            server = start.server
            if not isinstance(server, Server) or not trees.same_shapes(
                (networks, rows, stacked),
                (_networks(server), start.rows, start.clients.statistics),
            ):
                raise UsageError(
                    "a phase of pefll can only start from one of the same method, network and "
                    "hypernetwork: φ cannot be read from a model"
                )
            networks, rows, stacked = _networks(server), start.rows, start.clients.statistics
        momentum = initial_momentum(training, params, federation)
        server = Server(**networks, moments=optimizer.init(networks))
        return State(server, rows, Client(stacked, momentum))

    def send(state: State, ctx: ClientContext) -> PyTree:
        return _networks(state.server)

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        batch_key = jax.random.fold_in(ctx.key, 2)
        batch = batches.sample_batch(ctx.data, ctx.data.train, examples, batch_key)
        v, embedding_vjp = jax.vjp(lambda psi: of_batch(psi, batch), payload["embedding"])
        theta, generator_vjp = jax.vjp(lambda v: generate(payload["hypernetwork"], v), v)
        trained, momentum, metrics = train_model(
            {"params": theta, **client.statistics}, client.momentum, ctx
        )
        new, statistics = local_training.split_variables(trained)
        change = jax.tree.map(jnp.subtract, theta, new)
        (gradient,) = embedding_vjp(generator_vjp(change)[0])
        return ClientResult(
            upload={"descriptor": v, "change": change, "embedding_gradient": gradient},
            variables=trained,
            client=Client(statistics, momentum),
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[Server, Rows]:
        server, uploads = state.server, cohort.present(cohort.uploads)
        count = jnp.sum(cohort.arrived).astype(jnp.float32)

        def models(phi: PyTree) -> PyTree:
            return jax.vmap(generate, (None, 0))(phi, uploads["descriptor"])

        changes = jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), uploads["change"])
        (phi_gradient,) = jax.vjp(models, server.hypernetwork)[1](changes)
        zeros = jax.tree.map(jnp.zeros_like, server.embedding)
        psi_gradient = cohort.mean(uploads["embedding_gradient"], zeros, cohort.arrived)
        gradient = {"embedding": psi_gradient, "hypernetwork": phi_gradient}
        updates, moments = optimizer.update(gradient, server.moments, _networks(server))
        networks: Any = optax.apply_updates(_networks(server), updates)
        rows = Rows(cohort.put(state.rows.descriptor, uploads["descriptor"]))
        return Server(**networks, moments=moments), rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        v = of_client(state.server.embedding, ctx.data)
        return {"params": generate(state.server.hypernetwork, v), **client.statistics}

    def observe(state: State) -> dict[str, jax.Array]:
        v = state.rows.descriptor
        is_known = jnp.any(v != 0, 1)
        return {
            "descriptors": v,
            "spread": spread(
                lambda v: generate(state.server.hypernetwork, v), v, is_known | ~is_known.any()
            ),
        }

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
        observe=observe,
    )


def _spread_of_known(observed: Observed) -> Value | None:
    """Returns the mean spread of the clients that have sent a descriptor; of all if none has."""
    if "descriptors" not in observed.now:
        return None
    is_known = np.any(np.asarray(observed.now["descriptors"]) != 0, 1)
    included = is_known | ~is_known.any()
    return float(np.mean(np.asarray(observed.now["spread"])[included]))


def _networks(server: Server) -> dict[str, PyTree]:
    """Returns the parameters of both networks, by name."""
    return {"embedding": server.embedding, "hypernetwork": server.hypernetwork}


PEFLL = Method(
    pefll,
    title="PeFLL",
    paper="Scott et al. 2024",
    diagnostics={"spread": diagnostics("pefll")["spread"]._replace(value=_spread_of_known)},
    pictures={
        "spread": PICTURES["spread"],
        "descriptors": Picture(
            "Descriptors",
            "clients by the first two principal components of v, of their latest round",
            is_scatter=True,
        ),
    },
)
