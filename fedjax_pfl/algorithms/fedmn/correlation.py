"""A router that compares clients by the correlations between their images and labels.

A mean of separate embeddings of images and labels does not distinguish groups of clients that
number the same classes differently. With φx and φy of the same length d, the signature of client k
is

  r_k[j] = the correlation over its training examples of φx(x)[j] and φy(y)[j], in -1..1        [d]

Sampling n_k examples adds a variance S[j] = mean_k (1 - r_k[j]^2)^2 / (n_k - 1) to it. With m the
mean of r_k, let λ_i and u_i be the eigenvalues and eigenvectors of the covariance over clients of
D(r_k - m), D = diag(S)^(-1/2). All three are running averages over the K active clients, weighted
by n_k. By chance alone λ rarely exceeds λ+ = (1 + sqrt(d/K))^2, the edge of the Marchenko-Pastur
law for equal weights. Larger eigenvalues distinguish clients:

  f_i = max(0, 1 - λ+/λ_i),  ρ = max_i f_i
  s_k = sum_i f_i u_i u_i' D(r_k - m) / sqrt(sum_i f_i^2 λ_i)
  z_k = balanced(ρ W s_k + (1 - ρ) b)

Clients that differ by chance only (ρ = 0) all take the route of b. Otherwise the clients of a group
take the same route. `balanced` subtracts the mean over alternatives (over the sources of a block,
and over the blocks of the last layer), so of two alternatives exactly one is open. Only W and b are
trained.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedmn.router import Routing
from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.examples import Batch, ClientData

PyTree = Any
STATISTICS = "router_statistics"
# Initial standard deviation of a logit: π is then near 0 or 1 for four of five gates.
_LOGIT_SCALE = 8.0


class Signature(NamedTuple):
    """Correlations between images and labels of one client, [d] for embeddings of length d."""

    r: jax.Array  # [d]; correlation of the two embeddings over the client's examples, in -1..1
    chance: jax.Array  # [d]; variance of r that sampling the examples alone causes


class Correlation(nn.Module):
    """The router: embeddings φx of images and φy of labels, and the map of a signature to gates."""

    network: Any  # φx is a copy of it with d outputs
    layout: tuple[int, ...]  # number of blocks in each layer of the modular network
    clients: int  # number of active clients K
    size: int = 128  # d, the length of an embedding by φx or φy

    def setup(self) -> None:
        """Defines φx, a network like an encoder, and φy, a linear map of the one-hot label."""
        self.router_encoder = self.network.clone(outputs=self.size, parent=None)
        self.router_labels = nn.Dense(self.size, use_bias=False)
        self.router_gates = Gates(router.paths(self.layout))
        self.router_statistics = Statistics(self.clients)

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Maps all examples of a client, [B, ...] and one-hot [B, C], to logits of E gates, [E]."""
        return self.route(signature(moments(*self.embed(x, y), jnp.ones(len(x), bool)), len(x)).r)

    def embed(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns φx(x) and φy(y), [B, d] each, for x [B, ...] and one-hot y [B, C].

        BatchNorm uses its running statistics.
        """
        return self.router_encoder(x), self.router_labels(y)

    def route(self, r: jax.Array) -> jax.Array:
        """Maps the correlations r [d] of a signature to logits of E gates, [E]."""
        return balanced(self.router_gates(*self.router_statistics(r)), self.layout)


class Gates(nn.Module):
    """The map ρ W s + (1 - ρ) b from the standardised signature s to logits of gates.

    W [d, E] and b [E] are trained. ρ in 0..1 is an input, 0 if clients differ only by chance.
    """

    outputs: int  # number of gates E

    @nn.compact
    def __call__(self, s: jax.Array, rho: jax.Array) -> jax.Array:
        """Maps s [d] and the scalar ρ to [E]."""
        start = nn.initializers.normal(_LOGIT_SCALE)
        kernel = self.param("kernel", start, (s.shape[-1], self.outputs))
        bias = self.param("bias", start, (self.outputs,))
        return rho * jnp.dot(s, kernel, precision="highest") + (1 - rho) * bias


class Statistics(nn.Module):
    """Running averages of clients' signatures, in `batch_stats`, which standardise a signature.

    They are the mean of r, of r rᵀ and of the variance of r by chance. The module only reads them.
    A client moves them towards its own signature (`averaged`); the server averages the results.
    """

    clients: int  # number of active clients K

    @nn.compact
    def __call__(self, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps r [d] to the standardised signature s [d] and to ρ, a scalar in 0..1.

        ρ is 0, and so is s, if clients differ only by chance.
        """
        d = r.shape[-1]
        mean = self.variable("batch_stats", "mean", jnp.zeros, d).value
        square = self.variable("batch_stats", "square", jnp.eye, d).value
        chance = self.variable("batch_stats", "chance", jnp.ones, d).value
        unit = jnp.where(chance > 0, jax.lax.rsqrt(jnp.where(chance > 0, chance, 1.0)), 0.0)
        spread, axes = jnp.linalg.eigh((square - jnp.outer(mean, mean)) * jnp.outer(unit, unit))
        edge = (1 + (d / self.clients) ** 0.5) ** 2
        f = jnp.maximum(1 - edge / jnp.maximum(spread, edge), 0.0)
        along = f * jnp.dot((r - mean) * unit, axes, precision="highest")
        size = jnp.sum(jnp.square(f) * spread)
        scale = jnp.where(size > 0, jax.lax.rsqrt(jnp.where(size > 0, size, 1.0)), 0.0)
        return jnp.dot(axes, along, precision="highest") * scale, f.max()


def moments(image: jax.Array, label: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns sums over a batch of φx, φy, φx², φy² and φx φy, [5, d].

    `image` and `label` are φx and φy, [B, d]; `mask` is bool [B], False for padding.
    """
    terms = jnp.stack([image, label, image**2, label**2, image * label])
    return jnp.sum(jnp.where(mask[None, :, None], terms, 0.0), 1)


def signature(sums: jax.Array, count: Any) -> Signature:
    """Returns the signature from `moments` [5, d] of `count` examples; 0 where nothing varies."""
    x, y, xx, yy, xy = sums / jnp.maximum(count, 1)
    spread = jnp.maximum(xx - x * x, 0.0) * jnp.maximum(yy - y * y, 0.0)
    varies = spread > 1e-12
    r = jnp.where(varies, (xy - x * y) / jnp.sqrt(jnp.where(varies, spread, 1.0)), 0.0)
    r = jnp.clip(r, -1.0, 1.0)
    return Signature(r, jnp.where(varies, jnp.square(1 - r * r), 0.0) / jnp.maximum(count - 1, 1))


def correlated(network: Correlation, outputs: int, batch_size: int, first_round: int) -> Routing:
    """Returns the routing by correlations; each client moves the running averages by a tenth.

    In `first_round`, the first of the phase, they are replaced by the client's values. Examples
    have `outputs` classes and are read in batches of `batch_size`.
    """

    def signature_of(psi: PyTree, data: ClientData) -> Signature:
        return client_signature(network, psi, data, outputs, batch_size)

    def logits_of(psi: PyTree, data: ClientData) -> jax.Array:
        return logits(network, psi, signature_of(psi, data))

    def route(psi: PyTree, ctx: ClientContext) -> tuple[PyTree, jax.Array, router.Pullback]:
        client = signature_of(psi, ctx.data)
        psi = averaged(psi, client, jnp.where(ctx.t == first_round, 1.0, 0.1))
        return psi, logits(network, psi, client), partial(pull, network, psi, client)

    return Routing(init=network.init, logits=logits_of, route=route, frozen=router.EMBEDDINGS)


def client_signature(
    network: Correlation, variables: PyTree, data: ClientData, outputs: int, size: int
) -> Signature:
    """Returns the signature of a client's training examples of `outputs` classes.

    `variables` are the router's. Examples are read in batches of `size`.
    """

    def moments_of(batch: Batch) -> jax.Array:
        y = router.targets(batch, outputs)
        image, label = network.apply(variables, batch.x, y, method="embed")
        return moments(jnp.asarray(image), jnp.asarray(label), batch.mask)

    sums = batches.sum_batches(moments_of, data, data.train, size)
    return signature(sums, data.train.size.astype(jnp.float32))


def logits(network: Correlation, variables: PyTree, client: Signature) -> jax.Array:
    """Returns the logits of E gates, [E], of a client with this signature."""
    return jnp.asarray(network.apply(variables, client.r, method="route"))


def pull(
    network: Correlation, variables: PyTree, client: Signature, cotangent: jax.Array
) -> PyTree:
    """Returns the gradient of ⟨cotangent [E], logits⟩ in the router's parameters; 0 for φx and φy.

    Args:
      network: The router.
      variables: Its variables.
      client: Signature of the client, from which the logits are computed.
      cotangent: Gradient in the logits, [E].
    """
    params, model_state = local_training.split_variables(variables)

    def product(params: PyTree) -> jax.Array:
        return jnp.sum(cotangent * logits(network, {"params": params, **model_state}, client))

    return jax.grad(product)(params)


def averaged(variables: PyTree, client: Signature, share: Any) -> PyTree:
    """Returns the variables with running averages moved by `share`, 0..1, towards this client."""
    stats = variables["batch_stats"]
    target = {"mean": client.r, "square": jnp.outer(client.r, client.r), "chance": client.chance}
    moved = jax.tree.map(lambda a, b: a + share * (b - a), stats[STATISTICS], target)
    return {**variables, "batch_stats": {**stats, STATISTICS: moved}}


def balanced(z: jax.Array, layout: tuple[int, ...]) -> jax.Array:
    """Centres logits of gates, z [E], over the gates into each block, and into the output.

    A factor keeps their standard deviation. The only gate into a block gets a large logit, so that
    it is open. `layout` has the number of blocks of each layer. Returns shape [E].
    """
    parts = []
    for matrix in router.cut(z, layout):
        choices = matrix.shape[-1]
        if choices == 1:
            parts.append(jnp.full(matrix.size, _LOGIT_SCALE))
            continue
        centred = matrix - jnp.mean(matrix, -1, keepdims=True)
        parts.append((centred / jnp.sqrt(1 - 1 / choices)).ravel())
    return jnp.concatenate(parts)
