"""Hypernetwork of pFedHN: maps a client's embedding to all parameters of its network."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict, unfreeze

from fedjax_pfl.networks import init

PyTree = Any
# Power iterations before the first use. Later, one per step is enough: weights change little.
_FIRST_ITERATIONS = 15


class Linear(nn.Module):
    """A fully connected layer x K + b, with optional spectral normalisation of K.

    With it K is divided by its largest singular value ‖vᵀK‖. The left singular vector v is in the
    collection `spectral`. The gradient treats v as a constant; `advance` updates it.
    """

    outputs: int  # length of the result
    bias: bool = True  # whether to add b
    spectral_norm: bool = False  # divide K by its largest singular value

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., inputs] to [..., outputs]."""
        inputs = x.shape[-1]
        start = init.uniform(inputs)
        kernel = self.param("kernel", start, (inputs, self.outputs))
        if self.spectral_norm:

            def vector() -> jax.Array:
                random = jax.random.normal(self.make_rng("params"), (inputs,))
                return iterate(kernel, random, _FIRST_ITERATIONS)

            v = self.variable("spectral", "vector", vector).value
            kernel = kernel / jnp.linalg.norm(jnp.dot(v, kernel, precision="highest"))
        x = jnp.dot(x, kernel, precision="highest")
        return x + self.param("bias", start, (self.outputs,)) if self.bias else x


class Hypernetwork(nn.Module):
    """An MLP with one linear head for each array of a target network.

    The MLP has `depth` hidden layers with ReLU and one more linear layer without, all of `width`
    units. With width 0 there are only heads, without a bias: the linear hypernetwork θ = W v.

    References: Shamsian et al., Personalized Federated Learning using Hypernetworks (2021), section
    5 and appendix B. The last linear layer, and how layers are initialised, are those of the
    authors' PyTorch code.

    Args:
      target: Parameters of the target network as nested dicts, or their shapes; or a tuple of them
        for several networks.
      width: Units of each layer before the heads; 0 for none of these layers.
      depth: Number of hidden layers with ReLU.
      spectral_norm: Divide each weight matrix by its largest singular value.
    """

    target: PyTree
    width: int = 100
    depth: int = 3
    spectral_norm: bool = False

    @nn.compact
    def __call__(self, v: jax.Array) -> PyTree:
        """Returns the parameters for a client's embedding v [e], in the structure of `target`."""
        x = v
        for i in range(self.depth + 1 if self.width else 0):
            x = nn.relu(x) if i else x
            x = Linear(self.width, True, self.spectral_norm, name=f"layer{i + 1}")(x)

        def head(path: Any, leaf: Any) -> jax.Array:
            name = "head_" + jax.tree_util.keystr(path, simple=True, separator="_")
            flat = Linear(math.prod(leaf.shape), self.width > 0, self.spectral_norm, name=name)(x)
            return flat.reshape(leaf.shape).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(head, _thawed(self.target))


def _thawed(tree: PyTree) -> PyTree:
    """Returns the tree with plain dicts; Flax freezes those in a module's fields."""
    if isinstance(tree, tuple):
        return tuple(map(_thawed, tree))
    return unfreeze(tree) if isinstance(tree, FrozenDict) else tree


def iterate(kernel: jax.Array, v: jax.Array, steps: int = 1) -> jax.Array:
    """Runs `steps` power iterations on v [inputs] for the kernel [inputs, outputs].

    Returns a unit vector [inputs], close to the left singular vector of the largest singular value.
    """

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.maximum(jnp.linalg.norm(x), 1e-12)

    def step(_: Any, v: jax.Array) -> jax.Array:
        right = unit(jnp.dot(v, kernel, precision="highest"))
        return unit(jnp.dot(kernel, right, precision="highest"))

    # A loop: fifteen unrolled iterations for each layer take seconds to compile.
    return jax.lax.fori_loop(0, steps, step, v)


def advance(phi: PyTree, spectral: PyTree, steps: int = 1) -> PyTree:
    """Returns the collection `spectral` after `steps` more power iterations for each kernel.

    `phi` are the parameters of a `Hypernetwork`; `spectral` is {layer: {"vector": [inputs]}}.
    """
    return {
        layer: {"vector": iterate(phi[layer]["kernel"], variables["vector"], steps)}
        for layer, variables in spectral.items()
    }


def spread(
    generate: Callable[[jax.Array], PyTree], v: jax.Array, included: jax.Array | None = None
) -> jax.Array:
    """Distance of each generated model from their mean, divided by the mean's norm, [N].

    0 means that all clients get one model: the last ReLUs of the hypernetwork are dead. Models are
    generated one at a time, because N of them may not fit in memory.

    Args:
      generate: Maps an embedding [e] to a model's parameters.
      v: Embeddings [N, e].
      included: Clients whose models make the mean, bool [N], at least one; None: all.
    """
    included = jnp.ones(len(v), bool) if included is None else included
    count = jnp.sum(included)

    def add(total: PyTree, client: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
        embedding, counts = client

        def plus(a: jax.Array, b: jax.Array) -> jax.Array:
            return a + jnp.where(counts, b / count.astype(b.dtype), 0.0)

        return jax.tree.map(plus, total, generate(embedding)), None

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(generate, v[0]))
    mean, _ = jax.lax.scan(add, zeros, (v, included))

    def distance(embedding: jax.Array) -> jax.Array:
        return optax.tree.norm(optax.tree.sub(generate(embedding), mean)) / optax.tree.norm(mean)

    return jax.lax.map(distance, v)
