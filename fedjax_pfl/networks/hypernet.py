"""pFedHN's hypernetwork: a client's embedding in, all parameters of its network out."""

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
# Of the power iteration before the first use; afterwards the weights change little from step to
# step and one each is enough.
_FIRST_ITERATIONS = 15


class Linear(nn.Module):
    """A fully connected layer, whose weight K may be divided by its largest singular value σ.

    σ = ‖vᵀK‖ with v the left singular vector as the collection `spectral` has it, a constant to the
    gradient; `advance` keeps it up to date.
    """

    outputs: int
    bias: bool = True
    spectral_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
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
    """v [e] -> arrays like those of `target`: one linear head for each on a common MLP.

    The MLP is a linear layer and `depth` times ReLU and another one, without ReLU before the heads.
    With `normalize` that MLP is an odd function of v: it has no bias, and tanh of what has mean 0
    and deviation 1 over its units in place of ReLU; what comes into the heads has mean 0 and length
    1. What all clients have in common can then only go into the heads' biases; biases in between,
    and ReLUs, whose outputs have a mean above 0, turn the heads' inputs into one direction.
    Width 0 leaves heads without a bias alone: the linear hypernetwork θ = W v.

    target: a network's parameters, nested dicts, or their shapes; or a tuple of several networks'.

    References: Shamsian et al., Personalized Federated Learning using Hypernetworks (2021), section
    5 and appendix B ("three hidden layers"); layers start as in the authors' PyTorch code.
    """

    target: PyTree
    width: int = 100
    depth: int = 3
    spectral_norm: bool = False
    normalize: bool = False

    @nn.compact
    def __call__(self, v: jax.Array) -> PyTree:
        """The parameters of client v."""
        x = v
        for i in range(self.depth + 1 if self.width else 0):
            if i:
                x = jnp.tanh(standardized(x)) if self.normalize else nn.relu(x)
            bias = not self.normalize
            x = Linear(self.width, bias, self.spectral_norm, name=f"layer{i + 1}")(x)
        if self.normalize and self.width:
            x = standardized(x) / math.sqrt(self.width)

        def head(path: Any, leaf: Any) -> jax.Array:
            name = "head_" + jax.tree_util.keystr(path, simple=True, separator="_")
            made = Linear(math.prod(leaf.shape), self.width > 0, self.spectral_norm, name=name)(x)
            return made.reshape(leaf.shape).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(head, _thawed(self.target))


def _thawed(tree: PyTree) -> PyTree:
    """With plain dicts; Flax freezes those of a module's fields."""
    if isinstance(tree, tuple):
        return tuple(map(_thawed, tree))
    return unfreeze(tree) if isinstance(tree, FrozenDict) else tree


def standardized(x: jax.Array) -> jax.Array:
    """With mean 0 and deviation 1 over the last axis."""
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)


def iterate(kernel: jax.Array, v: jax.Array, steps: int = 1) -> jax.Array:
    """`steps` power iterations of v [inputs] towards a kernel's largest left singular vector."""

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.maximum(jnp.linalg.norm(x), 1e-12)

    def step(_: Any, v: jax.Array) -> jax.Array:
        right = unit(jnp.dot(v, kernel, precision="highest"))
        return unit(jnp.dot(kernel, right, precision="highest"))

    # A loop, because fifteen of them for each layer, written out, take seconds to compile.
    return jax.lax.fori_loop(0, steps, step, v)


def advance(phi: PyTree, spectral: PyTree, steps: int = 1) -> PyTree:
    """The collection `spectral` after more power iterations on the weights of φ."""
    return {
        layer: {"vector": iterate(phi[layer]["kernel"], own["vector"], steps)}
        for layer, own in spectral.items()
    }


def spread(generate: Callable[[jax.Array], PyTree], v: jax.Array) -> jax.Array:
    """How far what each v [N, e] generates is from the mean, in lengths of the mean: [N].

    0 says that all are alike: the last ReLUs of the hypernetwork are dead. One is held at a time.
    """

    def add(total: PyTree, one: jax.Array) -> tuple[PyTree, None]:
        return jax.tree.map(lambda a, b: a + b / len(v), total, generate(one)), None

    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(generate, v[0]))
    mean, _ = jax.lax.scan(add, nothing, v)

    def distance(one: jax.Array) -> jax.Array:
        return optax.tree.norm(optax.tree.sub(generate(one), mean)) / optax.tree.norm(mean)

    return jax.lax.map(distance, v)
