"""A multi-layer perceptron of any depth."""

import flax.linen as nn
import jax

from fedjax_pfl.networks import init


class MLP(nn.Module):
    """Fully connected layers fc1, fc2, ... with ReLU between them.

    Inputs of any shape are flattened.

    Args:
      hidden: outputs of each layer but the last; none: the model is linear.
    """

    outputs: int = 10
    hidden: tuple[int, ...] = (200,)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, from the input to the output."""
        return tuple(f"fc{i}" for i in range(1, len(self.hidden) + 2))

    @property
    def head(self) -> str:
        """Name of the last layer, the one that knows the classes."""
        return f"fc{len(self.hidden) + 1}"

    @nn.compact
    def __call__(
        self, x: jax.Array, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """[B, ...] -> [B, outputs]; `train` and `mask` change nothing here."""
        del train, mask
        x = x.reshape(x.shape[0], -1)
        for i, size in enumerate(self.hidden, 1):
            x = nn.relu(init.dense(x.shape[-1], size, f"fc{i}")(x))
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
