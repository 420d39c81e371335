"""GPFL: features for the client's head, and features that are guided by shared category embeddings.

Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for
Personalized Federated Learning, 2023. f = φ(x) are d features, C_c in R^d is the embedding of
class c, Ĉ the downloaded C, V the conditional valve. Client i has n_ic of its n_i examples in c:

  g = mean_c Ĉ_c,   p_i = mean_c n_ic/n_i Ĉ_c;   γ, β = V(g),   γ_i, β_i = V(p_i)
  f^G = ReLU((γ + 1) ⊙ f + β),   f^P = ReLU((γ_i + 1) ⊙ f + β_i)
  L = mean_x f_i(ω_i f^P) − log(exp(cos(f^G, C_y)) / Σ_c exp(cos(f^G, C_c))) + λ ‖f^G − Ĉ_y‖
  (φ_i, V_i, C_i, ω_i) ← SGD on L + μ/2 (‖V‖² + ‖C‖²), from (φ, V, C, ω_i);   ω_i stays
  φ, V, C ← Σ_k n_k (φ_k, V_k, C_k) / Σ_k n_k
γ and β are each LayerNorm(ReLU(Linear(condition))). A client is served ω_i f^P.

Deviations: the paper also lists f as an input of V; as in the authors' code V reads only g or p_i.
The paper penalises norms of V and C, the authors' code and ours half their squares. In the authors'
code the λ term of a batch is the norm over all its examples, p_i is a sum over classes, g and p_i
are 0 in the first round, and later computed from the client's C_i before the server's average.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.class_features import class_counts
from fedjax_pfl.algorithms.shared.initial_state import initial_momentum, initial_variables
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require, require_at_least
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.metrics import cross_entropy
from fedjax_pfl.networks import features
from fedjax_pfl.networks.init import dense

_EPSILON = 1e-12  # least norm of a vector, so that its gradient is finite


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    head: PyTree  # variables of the client's head ω_i
    momentum: PyTree  # optimiser state of all parameters, head included, or () if not kept


class Valve(nn.Module):
    """The conditional valve V: maps a condition [d] to a scale γ and a shift β, [d] each."""

    width: int  # d

    @nn.compact
    def __call__(self, condition: jax.Array) -> tuple[jax.Array, jax.Array]:
        def vector(name: str) -> jax.Array:
            v = dense(self.width, self.width, f"{name}_linear")(condition)
            return nn.LayerNorm(epsilon=1e-5, name=f"{name}_norm")(nn.relu(v))

        return vector("gamma"), vector("beta")


def route(valve: PyTree, condition: jax.Array, z: jax.Array) -> jax.Array:
    """Returns ReLU((γ + 1) ⊙ z + β), [B, d], with γ and β of the valve.

    Args:
      valve: Parameters of `Valve`.
      condition: Input of the valve, [d].
      z: Features, [B, d].
    """
    network: Any = Valve(z.shape[-1])
    gamma, beta = network.apply({"params": valve}, condition)
    return nn.relu((gamma + 1)[None] * z + beta[None])


def norm(v: jax.Array) -> jax.Array:
    """Euclidean norm of the rows of v [B, d], with a tiny lower bound. Returns [B, 1]."""
    squares = jnp.sum(jnp.square(v), -1, keepdims=True)
    return jnp.sqrt(jnp.maximum(squares, _EPSILON**2))


@dataclasses.dataclass(frozen=True)
class Valved:
    """The network for evaluation: the head reads the features after the valve, see `route`.

    Its variables are those of the plain network, the valve's parameters as `valve` in `params`, and
    the client's condition as `condition` [d].
    """

    network: Any  # the plain network

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """Returns the outputs [B, C] for examples x."""
        model = {name: tree for name, tree in variables.items() if name != "condition"}
        transform = partial(route, model["params"]["valve"], variables["condition"])
        return features.WithFeatures(self.network, transform).apply(model, x)[0]


class Guided(NamedTuple):
    """The network for training. Returns outputs, features for g, and the embeddings of classes.

    The parameters include the valve as `valve` and the embeddings as `categories`.
    """

    network: Any  # the plain network
    g: jax.Array  # [d]; the global condition, an input of the valve
    p: jax.Array  # [d]; the client's condition p_i, an input of the valve

    def apply(self, variables: PyTree, x: jax.Array, **options: Any) -> Any:
        """Returns ((outputs, features for g, categories), collections that training updates).

        Outputs [B, C] are those for the condition p; the features [B, d] are after the valve.
        """
        params = variables["params"]
        network = features.WithFeatures(self.network, partial(route, params["valve"], self.p))
        (outputs, z), updated = network.apply(variables, x, **options)
        return (outputs, route(params["valve"], self.g, z), params["categories"]), updated


def gpfl(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 0.01,
    decay: float = 0.1,
) -> Algorithm:
    """Creates GPFL, for classification: a personal head, and features guided by embeddings.

    The server stores the variables of the body φ, with the class embeddings C [classes, d] and the
    layers of the conditional valve V as parameters `categories` and `valve`. Clients store
    `Client`.

    Args:
      penalty: λ, the weight of the distance between an example's guided features and the embedding
        of its class.
      decay: μ, the weight decay of valve and embeddings, in addition to `weight_decay`.
    """
    require_at_least("gpfl.penalty", penalty, 0)
    require_at_least("gpfl.decay", decay, 0)
    task = federation.task
    if not task.has_classes:
        raise UsageError("gpfl learns an embedding of each class; choose a dataset with classes")
    classes, d = federation.outputs, features.width("gpfl", model, federation)

    def init(key: jax.Array, start: State | None = None) -> State:
        earlier = start if start is not None and isinstance(start.clients, Client) else None
        variables = initial_variables(model, federation, key, None if earlier else start)
        head, body = trees.split(variables, {model.head})
        valve_key, categories_key = jax.random.split(jax.random.fold_in(key, 1))
        added = {
            "valve": Valve(d).init(valve_key, jnp.zeros(d))["params"],
            "categories": jax.random.normal(categories_key, (classes, d)),
        }
        shared = trees.join(body, {"params": added})
        heads = trees.repeat(head, federation.clients)
        if earlier is not None:
            matches = trees.same_shapes((shared, heads), (earlier.server, earlier.clients.head))
            require(matches, "a phase of gpfl can only start from gpfl with the same network")
            shared, heads = earlier.server, earlier.clients.head
        params = trees.join(shared, trees.row(heads, 0))["params"]
        return State(shared, (), Client(heads, initial_momentum(training, params, federation)))

    def personal_condition(categories: jax.Array, ctx: ClientContext) -> jax.Array:
        """Returns p_i [d]: `categories` [C, d] times the client's shares of examples, averaged."""
        counts = class_counts(ctx.data, classes)
        shares = counts / jnp.maximum(jnp.sum(counts), 1.0)
        return jnp.matmul(shares / classes, categories, precision="highest")

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        downloaded = payload["params"]["categories"]
        p = personal_condition(downloaded, ctx)

        def loss(outputs: Any, y: jax.Array, mask: Any) -> jax.Array:
            logits, z, categories = outputs
            units = categories / norm(categories)
            cosines = jnp.matmul(z / norm(z), units.T, precision="highest")
            distances = norm(z - downloaded[y])[:, 0]
            angles = cross_entropy(cosines, y, None)
            return task.loss(logits, y, mask) + angles + penalty * distances

        network = Guided(model, jnp.mean(downloaded, 0), p)
        loss_gradient = local_training.gradient(network, task._replace(loss=loss), ctx.data)

        def gradient(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
            aux, grads = loss_gradient(params, model_state, batch, key)
            decayed = {
                name: jax.tree.map(lambda g, p: g + decay * p, grads[name], params[name])
                for name in ("valve", "categories")
            }
            return aux, {**grads, **decayed}

        variables, momentum, metrics = fit_variables(
            training, gradient, trees.join(payload, client.head), client.momentum, ctx
        )
        head, shared = trees.split(variables, {model.head})
        return ClientResult(
            upload=shared,
            variables={**variables, "condition": p},
            client=Client(head, momentum),
            metrics=metrics,
        )

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        p = personal_condition(state.server["params"]["categories"], ctx)
        return {**trees.join(state.server, client.head), "condition": p}

    return fedavg(model, training, federation)._replace(
        init=init, train=train, personalize=personalize, predict=Valved(model).apply
    )


GPFL = Method(gpfl, title="GPFL", paper="Zhang et al. 2023")
