"""Networks whose kernels are made of factors, from any network, without a second copy of it.

A reparametrised network has the same layers under the same names. Only kernels are replaced by
factors: all of them in `Factorized`, all but the head's in `SplitKernels` and `Hadamard`. It is
used like the network itself.
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

    model: Any
    input_shape: tuple[int, ...]
    input_dtype: str = dataclasses.field(default="float32", kw_only=True)
    sizes = (2, 3, 4)  # numbers of axes of the kernels that have factors; other kernels stay whole
    whole_head = True  # the head keeps its plain kernel

    @abc.abstractmethod
    def factors(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Returns initial factors for a kernel of this shape, sampled at random."""

    def first(self, key: jax.Array, kernel: jax.Array) -> dict[str, jax.Array]:
        """Returns initial factors for the kernel that the network itself would start with."""
        return self.factors(key, kernel.shape)

    @abc.abstractmethod
    def kernel(self, factors: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Returns the kernel of this shape that the factors make."""

    @property
    def head(self) -> str:
        return str(self.model.head)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.model.layers)

    @cached_property
    def factorized(self) -> tuple[str, ...]:
        """Names of the layers that have factors, from the input to the output."""
        leaves = jax.tree_util.tree_leaves_with_path(self._plain)
        kernel = jax.tree_util.DictKey("kernel")
        found = {
            trees.layer_name(p) for p, leaf in leaves if p[-1] == kernel and leaf.ndim in self.sizes
        }
        found -= {self.head} if self.whole_head else set()
        return tuple(name for name in self.layers if name in found)

    def init(self, key: jax.Array, x: jax.Array) -> dict[str, PyTree]:
        """Initialises the network, with factors in place of kernels."""
        variables = dict(self.model.init(key, x))

        def cut(tree: PyTree, path: tuple[str, ...] = ()) -> PyTree:
            if not isinstance(tree, dict):
                return tree
            made = {word: cut(part, (*path, word)) for word, part in tree.items()}
            if (name := "/".join(path)) in self.factorized:
                own = jax.random.fold_in(key, self.layers.index(name))
                made |= self.first(own, made.pop("kernel"))
            return made

        return {**variables, "params": cut(variables["params"])}

    def apply(self, variables: PyTree, *arguments: Any, **more: Any) -> Any:
        """Applies the network to kernels computed from the factors."""
        params = self.plain(variables["params"])
        return self.model.apply({**variables, "params": params}, *arguments, **more)

    def plain(self, params: PyTree) -> PyTree:
        """Returns the parameters in the network's own form, with kernels."""

        def join(plain: PyTree, part: PyTree, path: tuple[str, ...] = ()) -> PyTree:
            made = {}
            for leaf, shape in plain.items():
                if isinstance(shape, dict):
                    made[leaf] = join(shape, part[leaf], (*path, leaf))
                elif leaf == "kernel" and "/".join(path) in self.factorized:
                    made[leaf] = self.kernel(part, shape.shape)
                else:
                    made[leaf] = part[leaf]
            return made

        return join(self._plain, params)

    @cached_property
    def _plain(self) -> PyTree:
        example = jnp.zeros((1, *self.input_shape), self.input_dtype)
        return jax.eval_shape(self.model.init, jax.random.key(0), example)["params"]


@dataclasses.dataclass(frozen=True)
class Factorized(Reparametrised):
    """W = π(u vᵀ + μ) in every layer, the head included.

    u and v start from Xavier's uniform distribution and μ at zero.

    A dense kernel [I, O] has u [I, rank] and v [O, rank]. For a convolution's [F, F, I, O]
      kernel  u [F·F, rank], v [I·O, rank]: of rank 1 and with μ = 0 all F×F kernels are multiples
              of one another
      mixed   u [I·F, rank], v [O·F, rank], which the paper compares with
      oihw    u and v as in `kernel`, reshaped as the authors' code does, to [O, I, F, F]

    References: Jeong and Hwang, Factorized-FL (2022), (1) to (3).
    """

    rank: int = 1
    layout: str = "kernel"
    bias: bool = True  # whether there is a μ
    whole_head = False

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        if len(shape) == 2:
            return shape[0], shape[1]
        f, g, inputs, outputs = _window(shape)
        return (inputs * f, outputs * g) if self.layout == "mixed" else (f * g, inputs * outputs)

    def factors(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        rows, columns = self._sides(shape)
        u_key, v_key = jax.random.split(key)
        xavier = nn.initializers.xavier_uniform()
        made = {"u": xavier(u_key, (rows, self.rank)), "v": xavier(v_key, (columns, self.rank))}
        return made | ({"mu": jnp.zeros((rows, columns))} if self.bias else {})

    def kernel(self, factors: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        matrix = jnp.matmul(factors["u"], factors["v"].T, precision="highest")
        if self.bias:
            matrix += factors["mu"]
        if len(shape) > 2:
            f, g, inputs, outputs = _window(shape)
            if self.layout == "mixed":
                matrix = matrix.reshape(inputs, f, outputs, g).transpose(1, 3, 0, 2)
            if self.layout == "oihw":
                matrix = matrix.reshape(outputs, inputs, f, g).transpose(2, 3, 1, 0)
        return matrix.reshape(shape)


@dataclasses.dataclass(frozen=True)
class SplitKernels(Factorized):
    """W = π(u vᵀ + μ) that starts as the plain network's kernel. The head stays whole.

    u vᵀ is the best approximation of rank one of the unfolded kernel, u and v have the same length,
    and μ is the remainder, so that the network computes what the plain one does.
    """

    whole_head = True

    def first(self, key: jax.Array, kernel: jax.Array) -> dict[str, jax.Array]:
        matrix = kernel.reshape(self._sides(kernel.shape))
        u, scale, v = jnp.linalg.svd(matrix, full_matrices=False)
        root = jnp.sqrt(scale[0])
        made = {"u": u[:, :1] * root, "v": v[:1].T * root}
        return made | {"mu": matrix - jnp.matmul(made["u"], made["v"].T, precision="highest")}


def _window(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape [F, I, O] as [F, 1, I, O], and a shape of four axes unchanged."""
    return shape if len(shape) == 4 else (shape[0], 1, *shape[1:])


@dataclasses.dataclass(frozen=True)
class Hadamard(Reparametrised):
    """W = W1 ⊙ (W2 + 1), each of low rank: a dense Wi = xi yiᵀ, a convolution's Ti ×₃ yi ×₄ xi.

    With [F, F, I, O] and r the rank: t1, t2 [F, F, r, r], y1, y2 [I, r], x1, x2 [O, r]. The rank is
    ⌈√max(I, O)⌉, with which W can have full rank, plus the share `gamma` of what lies between it
    and the rank at which there would be as many numbers as in W.

    References: Hyeon-Woo, Ye-Bin and Oh, FedPara (2022), propositions 1 to 3 and pFedPara.
    """

    gamma: float = 0.0

    def rank(self, shape: tuple[int, ...]) -> int:
        """Returns the rank of each of the two factors of a kernel."""
        *window, inputs, outputs = shape
        least = math.ceil(math.sqrt(max(inputs, outputs)))
        area = math.prod(window)
        # 2 (area r² + r (I + O)) = area I O, or 2 r (I + O) = I O where there is no window
        both, whole = inputs + outputs, area * inputs * outputs
        if len(shape) == 2:
            most = whole / (2 * both)
        else:
            most = (math.sqrt(both**2 + 2 * area * whole) - both) / (2 * area)
        return max(least, round((1 - self.gamma) * least + self.gamma * most))

    def factors(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        *window, inputs, outputs = shape
        r, area = self.rank(shape), math.prod(window)
        made = {}
        for i, one in enumerate(jax.random.split(key), 1):
            y, x, t = jax.random.split(one, 3)
            # So that W1 starts with the variance 1/fan-in, and W2 with that, beside the 1.
            std = (1 / (area * inputs * r ** (2 if window else 1))) ** (1 / (6 if window else 4))
            made[f"y{i}"] = std * jax.random.normal(y, (inputs, r))
            made[f"x{i}"] = std * jax.random.normal(x, (outputs, r))
            if window:
                made[f"t{i}"] = std * jax.random.normal(t, (*window, r, r))
        return made

    def kernel(self, factors: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        def low(i: int) -> jax.Array:
            x, y = factors[f"x{i}"], factors[f"y{i}"]
            if len(shape) == 2:
                return jnp.matmul(y, x.T, precision="highest")
            return jnp.einsum("...rs,ir,os->...io", factors[f"t{i}"], y, x, precision="highest")

        return low(1) * (low(2) + 1)
