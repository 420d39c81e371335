"""A character model: an embedding, LSTM layers, and an output for each position."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init


class LSTMLayer(nn.Module):
    """[B, T, I] -> [B, T, H], from a state of zeros.

    i, f, o = σ(·), g = tanh(·) of [x_t, h] W + b, one matrix [I + H, 4H] in the order i, f, g, o;
    c ← f c + i g, h ← o tanh(c). Weights start as PyTorch's, from U(-1/√H, 1/√H).
    """

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The state h after each position."""
        start, h = init.uniform(self.hidden), self.hidden
        kernel = self.param("kernel", start, (x.shape[-1] + h, 4 * h))
        bias = self.param("bias", start, (4 * h,))
        below = jnp.matmul(x, kernel[: x.shape[-1]]) + bias.reshape(1, 1, -1)
        recurrent = kernel[x.shape[-1] :]

        def step(
            state: tuple[jax.Array, jax.Array], from_below: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            memory, now = state
            i, f, g, o = jnp.split(from_below + jnp.matmul(now, recurrent), 4, -1)
            memory = nn.sigmoid(f) * memory + nn.sigmoid(i) * jnp.tanh(g)
            now = nn.sigmoid(o) * jnp.tanh(memory)
            return (memory, now), now

        zero = jnp.zeros((x.shape[0], h), x.dtype)
        _, states = jax.lax.scan(step, (zero, zero), below.swapaxes(0, 1))
        return states.swapaxes(0, 1)


class LSTM(nn.Module):
    """Tokens int [B, T] to logits of the token that follows each: embed, lstm1, lstm2, ..., fc1.

    References: the Shakespeare model of Caldas et al., LEAF (2018), and of McMahan et al. (2017),
    which have 256 hidden units in two layers; smaller ones here, which a CPU can train.

    Args:
      embedding: numbers for each token.
      hidden: units of each LSTM layer.
      vocabulary: how many tokens there are; unset: as many as outputs.
    """

    outputs: int = 80
    embedding: int = 8
    hidden: tuple[int, ...] = (64,)
    vocabulary: int | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, from the input to the output."""
        return ("embed", *(f"lstm{i}" for i in range(1, len(self.hidden) + 1)), self.head)

    @property
    def head(self) -> str:
        """Name of the last layer, the one that knows the classes."""
        return "fc1"

    @nn.compact
    def __call__(
        self, x: jax.Array, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """int [B, T] -> [B, T, outputs]; `train` and `mask` change nothing here."""
        del train, mask
        x = nn.Embed(self.vocabulary or self.outputs, self.embedding, name="embed")(x)
        for i, hidden in enumerate(self.hidden, 1):
            x = LSTMLayer(hidden, name=f"lstm{i}")(x)
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
