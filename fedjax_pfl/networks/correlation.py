"""A router that sees which label goes with which image, by a client's own correlations.

FedMN's router averages embeddings of images and labels side by side, so that groups of clients that
number the same classes differently look alike to it. With φx and φy of one length d, the signature
of client k is

  r_k[j] = the correlation over its training examples of φx(x)[j] and φy(y)[j]        in −1..1, [d]

into which drawing n_k examples brings a variance of S[j] = mean_k (1 − r_k[j]²)² / (n_k − 1). With
m̄ the mean over the K clients, and λ_i and u_i the eigenvalues and -vectors of the covariance over
them of D(r_k − m̄), D = diag(S)^−½, chance alone hardly brings a λ above λ₊ = (1 + √(d/K))², the
edge of Marchenko and Pastur's law. What is above it tells clients apart:

  f_i = max(0, 1 − λ₊/λ_i),  ρ = max_i f_i,  s_k = Σ_i f_i u_i u_iᵀ D(r_k − m̄) / √Σ_i f_i² λ_i
  z_k = balanced(ρ W s_k + (1 − ρ) b)

Clients that differ by no more than chance (ρ = 0) all take the route of b; others one by what tells
them apart, and clients of one group the same. `balanced` takes the mean over alternatives off: over
the sources of a block, and over the blocks of the last layer; so that of two just one is open. W
and b alone learn.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core import local_training
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.networks import router

PyTree = Any
STATISTICS = "router_statistics"
# Deviation over clients of a logit at first: π is then near 0 or 1 for four of five gates.
_DECIDED = 8.0


class Signature(NamedTuple):
    """What a client tells of itself."""

    r: jax.Array  # [d]
    chance: jax.Array  # [d], its part of S


class Correlation(nn.Module):
    """φx, φy and the linear map of a signature."""

    network: Any
    layout: tuple[int, ...]
    clients: int  # K
    size: int = 128  # d

    def setup(self) -> None:
        """φx is a network like an encoder, φy a linear map of the one-hot label."""
        self.router_encoder = self.network.clone(outputs=self.size, parent=None)
        self.router_labels = nn.Dense(self.size, use_bias=False)
        self.router_gates = Gates(router.paths(self.layout))
        self.router_statistics = Statistics(self.clients)

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Of all examples at once: [B, ...] and [B, C] -> [E]."""
        return self.route(signature(moments(*self.embed(x, y), jnp.ones(len(x), bool)), len(x)).r)

    def embed(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """φx(x) and φy(y), [B, d] each. BatchNorm goes by its running statistics."""
        return self.router_encoder(x), self.router_labels(y)

    def route(self, r: jax.Array) -> jax.Array:
        """[d] -> logits [E]."""
        apart, clear = self.router_statistics(r)
        return balanced(self.router_gates(apart, clear), self.layout)


class Gates(nn.Module):
    """ρ W s + (1 − ρ) b."""

    outputs: int

    @nn.compact
    def __call__(self, s: jax.Array, clear: jax.Array) -> jax.Array:
        """[d] and ρ -> [E]"""
        start = nn.initializers.normal(_DECIDED)
        kernel = self.param("kernel", start, (s.shape[-1], self.outputs))
        bias = self.param("bias", start, (self.outputs,))
        return clear * jnp.dot(s, kernel, precision="highest") + (1 - clear) * bias


class Statistics(nn.Module):
    """m̄, the covariance and S: running averages, which clients move and the server averages."""

    clients: int

    @nn.compact
    def __call__(self, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[d] -> s and ρ"""
        d = r.shape[-1]
        mean = self.variable("batch_stats", "mean", jnp.zeros, d).value
        square = self.variable("batch_stats", "square", jnp.eye, d).value
        chance = self.variable("batch_stats", "chance", jnp.ones, d).value
        unit = jnp.where(chance > 0, jax.lax.rsqrt(jnp.where(chance > 0, chance, 1.0)), 0.0)
        spread, axes = jnp.linalg.eigh((square - jnp.outer(mean, mean)) * jnp.outer(unit, unit))
        edge = (1 + (d / self.clients) ** 0.5) ** 2
        kept = jnp.maximum(1 - edge / jnp.maximum(spread, edge), 0.0)
        along = kept * jnp.dot((r - mean) * unit, axes, precision="highest")
        size = jnp.sum(jnp.square(kept) * spread)
        s = jnp.dot(axes, along, precision="highest")
        return s * jnp.where(
            size > 0, jax.lax.rsqrt(jnp.where(size > 0, size, 1.0)), 0.0
        ), kept.max()


def moments(seen: jax.Array, told: jax.Array, mask: jax.Array) -> jax.Array:
    """Sums over examples of φx, φy, φx², φy² and φx φy: [5, d]."""
    each = jnp.stack([seen, told, seen**2, told**2, seen * told])
    return jnp.sum(jnp.where(mask[None, :, None], each, 0.0), 1)


def signature(sums: jax.Array, count: Any) -> Signature:
    """r and what chance adds to it; 0 where an embedding is the same for all examples."""
    count = jnp.maximum(count, 2)
    x, y, xx, yy, xy = sums / count
    spread = jnp.maximum(xx - x * x, 0.0) * jnp.maximum(yy - y * y, 0.0)
    known = spread > 1e-12
    r = jnp.where(known, (xy - x * y) / jnp.sqrt(jnp.where(known, spread, 1.0)), 0.0)
    r = jnp.clip(r, -1.0, 1.0)
    return Signature(r, jnp.where(known, jnp.square(1 - r * r), 0.0) / (count - 1))


def correlated(network: Correlation, outputs: int, size: int) -> router.Routes:
    """Examples are read once a visit, `size` at a time, since φx and φy do not learn."""

    def seen_of(psi: PyTree, data: ClientData) -> Signature:
        return look(network, psi, data, outputs, size)

    def of_client(psi: PyTree, data: ClientData, seen: Signature) -> jax.Array:
        return logits(network, psi, seen)

    def pulled(psi: PyTree, data: ClientData, seen: Signature, cotangent: jax.Array) -> PyTree:
        return pull(network, psi, seen, cotangent)

    return router.Routes(network.init, seen_of, averaged, of_client, pulled, router.EMBEDDINGS)


def look(
    network: Correlation, variables: PyTree, data: ClientData, outputs: int, size: int
) -> Signature:
    """The signature of a client, by its training examples, `size` at a time."""

    def one(batch: Batch) -> jax.Array:
        y = router.targets(batch, outputs)
        both: Any = network.apply(variables, batch.x, y, method="embed")
        return moments(both[0], both[1], batch.mask)

    sums = local_training.total(one, data, data.train, size)
    return signature(sums, data.train.size.astype(jnp.float32))


def logits(network: Correlation, variables: PyTree, seen: Signature) -> jax.Array:
    """[E]"""
    return jnp.asarray(network.apply(variables, seen.r, method="route"))


def pull(network: Correlation, variables: PyTree, seen: Signature, cotangent: jax.Array) -> PyTree:
    """The gradient of ⟨cotangent, logits⟩ in the parameters; 0 in those of φx and φy."""
    params, rest = local_training.split_variables(variables)

    def along(params: PyTree) -> jax.Array:
        return jnp.sum(cotangent * logits(network, {"params": params, **rest}, seen))

    return jax.grad(along)(params)


def averaged(variables: PyTree, seen: Signature, share: Any) -> PyTree:
    """The variables with that share of m̄, the mean of r rᵀ and S from this client."""
    kept = variables["batch_stats"]
    own = {"mean": seen.r, "square": jnp.outer(seen.r, seen.r), "chance": seen.chance}
    moved = jax.tree.map(lambda a, b: a + share * (b - a), kept[STATISTICS], own)
    return {**variables, "batch_stats": {**kept, STATISTICS: moved}}


def balanced(z: jax.Array, layout: tuple[int, ...]) -> jax.Array:
    """Less the mean over alternatives, at the deviation they had; open where there is no other."""
    made = []
    for matrix in router.cut(z, layout):
        choices = matrix.shape[-1]
        if choices == 1:
            made.append(jnp.full(matrix.size, _DECIDED))
            continue
        apart = matrix - jnp.mean(matrix, -1, keepdims=True)
        made.append((apart / jnp.sqrt(1 - 1 / choices)).ravel())
    return jnp.concatenate(made)
