"""FedCP: a policy network splits the features of each example between a global and a personal head.

Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via
Conditional Policy, 2023. φ is the body, ω the global head, ω_i the client's, Θ the policy network;
h = φ_i(x) are d features and v_i is the unit vector along Σ_c ω_i[:, c] at the start of the round:

  a = ReLU(LayerNorm(Linear(v_i ⊙ h; Θ))), two numbers per feature;   r, s = softmax of each two
  out(x) = ω(r ⊙ h) + ω_i(s ⊙ h)
  (φ_i, ω_i, Θ_i) ← SGD on f(out) + λ MMD(φ_i(x), φ(x)), from (φ, ω_i, Θ);   ω and φ are constants
  φ ← Σ_k n_k φ_k / Σ_k n_k,   Θ ← Σ_k n_k Θ_k / Σ_k n_k,   ω ← Σ_k n_k (ω + ω_k)/2 / Σ_k n_k
ω_i starts equal to ω and stays on the client. MMD compares the two sets of features of a batch, as
in the authors' code with the kernel Σ_a exp(−‖h − h'‖²/(2a)), a in 10, 15, 20 and 50.

Deviations: the authors' code adds Gumbel noise to a in training and evaluation; here r and s have
no noise. v_i of the first round is that of ω; in the authors' code it is random. The downloaded φ
computes its features in evaluation mode. Clients that are not sampled are evaluated with the newest
ω and Θ; the authors' code uses the ones from their last round. BatchNorm statistics are averaged.
With `privacy=example` MMD compares the features of one example.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_client_rows,
    initial_momentum,
)
from fedjax_pfl.algorithms.shared.linear_head import head_layer, linear_head_width
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
from fedjax_pfl.core.errors import require_at_least
from fedjax_pfl.networks import features
from fedjax_pfl.networks.init import dense

_BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    head: PyTree  # variables of the personal head ω_i
    momentum: PyTree  # optimiser state of body, personal head and policy, or () if not kept


class Policy(nn.Module):
    """The policy network Θ: maps inputs [B, d] to two shares r and s of each feature.

    Both have shape [B, d], and r + s = 1. r is for the global head, s for the personal one.
    """

    width: int  # d

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = dense(self.width, 2 * self.width, "linear")(x)
        a = nn.relu(nn.LayerNorm(epsilon=1e-5, name="norm")(a))
        shares = jax.nn.softmax(a.reshape(-1, 2, self.width), 1)
        return shares[:, 0], shares[:, 1]


def direction(head: PyTree) -> jax.Array:
    """Returns the unit vector [d] along the sum of a head's `kernel` [d, C] over outputs."""
    v = jnp.sum(head["kernel"], 1)
    return v / jnp.maximum(jnp.linalg.norm(v), 1e-12)


def two_heads(
    z: jax.Array, policy: PyTree, head: PyTree, personal: PyTree, v: jax.Array
) -> jax.Array:
    """Returns the sum of the outputs of a global and a personal head, [B, C].

    The policy network splits the features between the two heads.

    Args:
      z: Features [B, d].
      policy: Parameters of the policy network, whose input is v ⊙ z.
      head: Parameters of the global head, as `head_layer` returns them.
      personal: Parameters of the personal head.
      v: `direction` of the personal head, [d].
    """
    network: Any = Policy(z.shape[-1])
    r, s = network.apply({"params": policy}, v[None] * z)
    layer: Any = nn.Dense(head["kernel"].shape[1], use_bias="bias" in head)
    return layer.apply({"params": head}, r * z) + layer.apply({"params": personal}, s * z)


def discrepancy(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the squared maximum mean discrepancy of a and b, [B, d] each, as an array [].

    Only rows where `mask`, bool [B], is True count.
    """
    weights = mask.astype(jnp.float32)
    weights /= jnp.maximum(jnp.sum(weights), 1.0)

    def mean_kernel(a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns the mean kernel over all pairs of a row of a and a row of b, []."""
        products = jnp.matmul(a, b.T, precision="highest")
        distances = jnp.sum(a * a, 1)[:, None] + jnp.sum(b * b, 1)[None] - 2 * products
        kernel = sum(jnp.exp(-distances / (2 * bandwidth)) for bandwidth in _BANDWIDTHS)
        return jnp.sum(weights[:, None] * weights[None] * kernel)

    return mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)


@dataclasses.dataclass(frozen=True)
class TwoHeads:
    """The network for evaluation: the sum of the outputs of a global and a personal head.

    A policy network divides the features between the heads, see `two_heads`. The variables are
    those of `network` with the global head, the parameters of the policy network as `policy` in
    `params`, and the variables of the personal head as `personal_head`.
    """

    network: Any  # the plain network

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """Returns the outputs [B, C] for examples x."""
        model = {name: tree for name, tree in variables.items() if name != "personal_head"}
        z = features.WithFeatures(self.network).apply(model, x)[1]
        personal = head_layer(self.network, variables["personal_head"])
        head, policy = head_layer(self.network, model), model["params"]["policy"]
        return two_heads(z, policy, head, personal, direction(personal))


class Separated(NamedTuple):
    """The network for training, see `two_heads`. It returns (outputs, MMD).

    The head among its variables is the personal one. MMD, the maximum mean discrepancy, compares
    its features with those of the downloaded body.
    """

    network: Any  # the plain network
    payload: PyTree  # downloaded variables, with the global head; constants
    v: jax.Array  # [d]; `direction` of the personal head at the start of the round

    def apply(self, variables: PyTree, x: jax.Array, *, mask: jax.Array, **options: Any) -> Any:
        """Returns ((outputs [B, C], MMD []), collections that training updates).

        `mask`, bool [B], is False for padding; `options` are those of a Flax module's `apply`.
        """
        network = features.WithFeatures(self.network)
        (_, z), updated = network.apply(variables, x, mask=mask, **options)
        outputs = two_heads(
            z,
            variables["params"]["policy"],
            head_layer(self.network, self.payload),
            head_layer(self.network, variables),
            self.v,
        )
        return (outputs, discrepancy(z, network.apply(self.payload, x)[1], mask)), updated


def fedcp(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 5.0,
) -> Algorithm:
    """Creates FedCP: a policy network splits features between a global and a personal head.

    The head of the network must be a Dense layer.
    The server stores the variables of the body φ and the global head ω, and the parameters of the
    policy network Θ under `policy`. Clients store `Client`, with their personal head ω_i.

    Args:
      penalty: λ, the weight of the discrepancy (MMD) between the features of the body in training
        and of the downloaded body.
    """
    require_at_least("fedcp.penalty", penalty, 0)
    d = linear_head_width("fedcp", model, federation)
    base = fedavg(model, training, federation)

    def init(key: jax.Array, start: State | None = None) -> State:
        policy = Policy(d).init(jax.random.fold_in(key, 1), jnp.zeros((1, d)))["params"]
        if start is not None and isinstance(start.clients, Client):
            parameters = dict(start.server["params"])
            policy = parameters.pop("policy")
            start = start._replace(server={**start.server, "params": parameters})
        server = base.init(key, start).server
        server = {**server, "params": {**server["params"], "policy": policy}}
        head = trees.split(server, {model.head})[0]
        client = Client(
            initial_client_rows(head, start, Client, "head", federation),
            initial_momentum(training, server["params"], federation),
        )
        return State(server, (), client)

    def loss(outputs: Any, y: jax.Array, classes: Any) -> jax.Array:
        logits, mmd = outputs
        return federation.task.loss(logits, y, classes) + penalty * mmd

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        head, shared = trees.split(payload, {model.head})
        network = Separated(model, payload, direction(head_layer(model, client.head)))
        gradient = local_training.gradient(network, federation.task._replace(loss=loss), ctx.data)
        trained, momentum, metrics = fit_variables(
            training, gradient, trees.join(shared, client.head), client.momentum, ctx
        )
        personal, shared = trees.split(trained, {model.head})
        mean_head = jax.tree.map(lambda a, b: (a + b) / 2, head, personal)
        return ClientResult(
            upload=trees.join(shared, mean_head),
            variables={**trees.join(shared, head), "personal_head": personal},
            client=Client(personal, momentum),
            metrics=metrics,
        )

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return {**state.server, "personal_head": client.head}

    return base._replace(
        init=init,
        train=train,
        personalize=personalize,
        predict=TwoHeads(model).apply,
        kept_change={model.head: 1.0},  # the personal head, half of the upload, never restarts
    )


FEDCP = Method(fedcp, title="FedCP", paper="Zhang et al. 2023")
