"""Wrappers that replace the kernels of any network by factors.

The wrapped network has the same layers with the same names and is used in the same way.
`Factorized` replaces all kernels; `SplitKernels` and `Hadamard` keep the head's kernel.
"""

import abc
import dataclasses
import math
from functools import cached_property
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees

PyTree = Any
LAYOUTS = ("kernel", "mixed", "oihw")


@dataclasses.dataclass(frozen=True)
class Reparametrised(abc.ABC):
    """`model` with kernels computed from factors at every call."""

    model: Any  # the network with plain kernels
    input_shape: tuple[int, ...]  # of one example
    input_dtype: str = dataclasses.field(default="float32", kw_only=True)
    kernel_axes = (2, 3, 4)  # kernels with another number of axes are not factorised
    head_keeps_kernel = True  # whether the head keeps its kernel

    @abc.abstractmethod
    def factors(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Returns random initial factors by name, such as `u`, for a kernel of this shape."""

    def initial_factors(self, key: jax.Array, kernel: jax.Array) -> dict[str, jax.Array]:
        """Returns initial factors of a layer, given the initial kernel of `model`."""
        return self.factors(key, kernel.shape)

    @abc.abstractmethod
    def kernel(self, factors: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Computes the kernel of this shape from its factors."""

    @property
    def head(self) -> str:
        return str(self.model.head)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.model.layers)

    @cached_property
    def factorized(self) -> tuple[str, ...]:
        """Names of the layers with factors, from the input to the output."""
        leaves = jax.tree_util.tree_leaves_with_path(self._param_shapes)
        kernel = jax.tree_util.DictKey("kernel")
        names = {
            trees.layer_name(path)
            for path, leaf in leaves
            if path[-1] == kernel and leaf.ndim in self.kernel_axes
        }
        names -= {self.head} if self.head_keeps_kernel else set()
        return tuple(name for name in self.layers if name in names)

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """Returns initial variables for x [B, ...], with factors instead of kernels."""
        variables = dict(self.model.init(key, x))

        def factorize(tree: PyTree, path: tuple[str, ...] = ()) -> PyTree:
            if not isinstance(tree, dict):
                return tree
            params = {name: factorize(part, (*path, name)) for name, part in tree.items()}
            if (layer := "/".join(path)) in self.factorized:
                layer_key = jax.random.fold_in(key, self.layers.index(layer))
                params |= self.initial_factors(layer_key, params.pop("kernel"))
            return params

        return {**variables, "params": factorize(variables["params"])}

    def apply(self, variables: PyTree, *arguments: Any, **options: Any) -> Any:
        """Applies `model` with kernels computed from the factors; passes the other arguments on."""
        params = self.model_params(variables["params"])
        return self.model.apply({**variables, "params": params}, *arguments, **options)

    def model_params(self, params: PyTree) -> PyTree:
        """Returns the parameters of `model`: `kernel` instead of the factors in `params`."""

        def with_kernels(shapes: PyTree, factors: PyTree, path: tuple[str, ...] = ()) -> PyTree:
            result = {}
            for name, shape in shapes.items():
                if isinstance(shape, dict):
                    result[name] = with_kernels(shape, factors[name], (*path, name))
                elif name == "kernel" and "/".join(path) in self.factorized:
                    result[name] = self.kernel(factors, shape.shape)
                else:
                    result[name] = factors[name]
            return result

        return with_kernels(self._param_shapes, params)

    @cached_property
    def _param_shapes(self) -> PyTree:
        """Shapes of the parameters of `model`."""
        example = jnp.zeros((1, *self.input_shape), self.input_dtype)
        return jax.eval_shape(self.model.init, jax.random.key(0), example)["params"]


@dataclasses.dataclass(frozen=True)
class Factorized(Reparametrised):
    """Kernels W = π(u vᵀ + μ) in every layer, including the head.

    u and v are initialised from Xavier's uniform distribution, μ with zeros. π reshapes.

    For a dense kernel [I, O], u is [I, rank] and v is [O, rank]. For a convolution [F, F, I, O]:
      kernel  u [F·F, rank], v [I·O, rank]. With rank 1 and μ = 0 all F×F kernels are proportional.
      mixed   u [I·F, rank], v [O·F, rank], the alternative that the paper compares with.
      oihw    u and v as in `kernel`, reshaped to [O, I, F, F] as in the authors' code.

    References: Jeong and Hwang, Factorized-FL (2022), (1) to (3).
    """

    rank: int = 1  # number of columns of u and v
    layout: str = "kernel"  # kernel, mixed or oihw
    bias: bool = True  # whether to add μ
    head_keeps_kernel = False

    def _matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of u vᵀ for a kernel of this shape, [I, O] or [F, F, I, O]."""
        if len(shape) == 2:
            return shape[0], shape[1]
        f, g, inputs, outputs = _four_axes(shape)
        return (inputs * f, outputs * g) if self.layout == "mixed" else (f * g, inputs * outputs)

    def factors(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Returns factors of a kernel of this shape: random u and v, and mu = 0 if `bias` is set.

        Their shapes are in the docstring of the class.
        """
        rows, columns = self._matrix_shape(shape)
        u_key, v_key = jax.random.split(key)
        xavier = nn.initializers.xavier_uniform()
        factors = {"u": xavier(u_key, (rows, self.rank)), "v": xavier(v_key, (columns, self.rank))}
        return factors | ({"mu": jnp.zeros((rows, columns))} if self.bias else {})

    def kernel(self, factors: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Returns the kernel u vᵀ + μ of shape `shape`, given its factors u, v and mu."""
        matrix = jnp.matmul(factors["u"], factors["v"].T, precision="highest")
        if self.bias:
            matrix += factors["mu"]
        if len(shape) > 2:
            f, g, inputs, outputs = _four_axes(shape)
            if self.layout == "mixed":
                matrix = matrix.reshape(inputs, f, outputs, g).transpose(1, 3, 0, 2)
            if self.layout == "oihw":
                matrix = matrix.reshape(outputs, inputs, f, g).transpose(2, 3, 1, 0)
        return matrix.reshape(shape)


@dataclasses.dataclass(frozen=True)
class SplitKernels(Factorized):
    """Kernels W = π(u vᵀ + μ), initialised to the kernels of `model`. The head is not factorised.

    u vᵀ is the best rank-one approximation of the reshaped kernel, with ‖u‖ = ‖v‖, and μ is the
    remainder. The network starts with the outputs of `model`.
    """

    head_keeps_kernel = True

    def initial_factors(self, key: jax.Array, kernel: jax.Array) -> dict[str, jax.Array]:
        """Returns u and v of the largest singular value of the kernel, and the remainder μ."""
        matrix = kernel.reshape(self._matrix_shape(kernel.shape)).astype(jnp.float32)
        u, scale, v = jnp.linalg.svd(matrix, full_matrices=False)  # has no narrower dtypes
        root = jnp.sqrt(scale[0])
        u, v = u[:, :1] * root, v[:1].T * root
        factors = {"u": u, "v": v, "mu": matrix - jnp.matmul(u, v.T, precision="highest")}
        return {name: factor.astype(kernel.dtype) for name, factor in factors.items()}


def _four_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape [F, I, O] as [F, 1, I, O], and a shape of four axes unchanged."""
    return shape if len(shape) == 4 else (shape[0], 1, *shape[1:])


@dataclasses.dataclass(frozen=True)
class Hadamard(Reparametrised):
    """Kernels W = W1 ⊙ (W2 + 1) with factors W1 and W2 of low rank. The head is not factorised.

    A dense layer has Wi = yi xiᵀ, a convolution Wi = Ti ×₃ yi ×₄ xi. For a kernel [F, F, I, O] and
    rank r, the shapes are ti [F, F, r, r], yi [I, r] and xi [O, r].

    References: Hyeon-Woo, Ye-Bin and Oh, FedPara (2022), propositions 1 to 3 and pFedPara.

    Args:
      gamma: Chooses the rank, from 0 to 1. With 0 it is ⌈√max(I, O)⌉, with which W can have full
        rank; ⌈√min(I, O)⌉ would be enough, but the authors' code takes the larger. With 1 the
        factors have about the size of W. The rank never falls below its value for 0, so factors of
        small kernels can have more entries than W.
    """

    gamma: float = 0.0

    def rank(self, shape: tuple[int, ...]) -> int:
        """Returns the rank of W1 and of W2 for a kernel of this shape, [I, O] or [F, F, I, O]."""
        *window, inputs, outputs = shape
        min_rank = math.ceil(math.sqrt(max(inputs, outputs)))
        area = math.prod(window)
        # max_rank solves 2 (area r² + r (I + O)) = area I O, or 2 r (I + O) = I O without a window.
        channels, kernel_size = inputs + outputs, area * inputs * outputs
        if len(shape) == 2:
            max_rank = kernel_size / (2 * channels)
        else:
            max_rank = (math.sqrt(channels**2 + 2 * area * kernel_size) - channels) / (2 * area)
        return max(min_rank, round((1 - self.gamma) * min_rank + self.gamma * max_rank))

    def factors(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Returns random factors of a kernel of this shape: y1, x1, y2, x2.

        A convolution has t1 and t2 too. Their shapes are in the docstring of the class.
        """
        *window, inputs, outputs = shape
        r, area = self.rank(shape), math.prod(window)
        factors = {}
        for i, factor_key in enumerate(jax.random.split(key), 1):
            y, x, t = jax.random.split(factor_key, 3)
            # The standard deviation with which W1 and W2 have variance 1/fan-in.
            std = (1 / (area * inputs * r ** (2 if window else 1))) ** (1 / (6 if window else 4))
            factors[f"y{i}"] = std * jax.random.normal(y, (inputs, r))
            factors[f"x{i}"] = std * jax.random.normal(x, (outputs, r))
            if window:
                factors[f"t{i}"] = std * jax.random.normal(t, (*window, r, r))
        return factors

    def kernel(self, factors: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Computes W1 ⊙ (W2 + 1), of this shape, from the factors t1, y1, x1, t2, y2 and x2."""

        def low_rank(i: int) -> jax.Array:
            x, y = factors[f"x{i}"], factors[f"y{i}"]
            if len(shape) == 2:
                return jnp.matmul(y, x.T, precision="highest")
            return jnp.einsum("...rs,ir,os->...io", factors[f"t{i}"], y, x, precision="highest")

        return low_rank(1) * (low_rank(2) + 1)
