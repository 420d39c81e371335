"""A multi-layer perceptron of any depth."""

import flax.linen as nn
import jax

from fedjax_pfl.networks import init


class MLP(nn.Module):
    """Fully connected layers fc1, fc2, ... with ReLU between them.

    Inputs are flattened.

    Args:
      hidden: Number of outputs of each layer except the last. Empty: a linear model.
    """

    outputs: int = 10
    hidden: tuple[int, ...] = (200,)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(f"fc{i}" for i in range(1, len(self.hidden) + 2))

    @property
    def head(self) -> str:
        return f"fc{len(self.hidden) + 1}"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps [B, ...] to [B, outputs]; `train` and `mask` are ignored."""
        del train, mask
        x = x.reshape(x.shape[0], -1)
        for i, size in enumerate(self.hidden, 1):
            x = nn.relu(init.dense(x.shape[-1], size, f"fc{i}")(x))
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
