"""A language model with LSTM layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init


class LSTMLayer(nn.Module):
    """LSTM over [B, T, I] with initial state zero.

    i, f, o = σ(z) and g = tanh(z) for the parts of z = [x_t, h] W + b in the order i, f, g, o, then
    c ← f c + i g and h ← o tanh(c). W has shape [I + H, 4H]. Weights are initialised from
    U(-1/√H, 1/√H), as in PyTorch.
    """

    hidden: int  # number of units H

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the state h after every position, [B, T, H]."""
        initializer, h = init.uniform(self.hidden), self.hidden
        kernel = self.param("kernel", initializer, (x.shape[-1] + h, 4 * h))
        bias = self.param("bias", initializer, (4 * h,))
        inputs = jnp.matmul(x, kernel[: x.shape[-1]]) + bias.reshape(1, 1, -1)
        recurrent = kernel[x.shape[-1] :]

        def step(
            state: tuple[jax.Array, jax.Array], x_t: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            c, h = state
            i, f, g, o = jnp.split(x_t + jnp.matmul(h, recurrent), 4, -1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
            h = nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        zero = jnp.zeros((x.shape[0], h), x.dtype)
        _, states = jax.lax.scan(step, (zero, zero), inputs.swapaxes(0, 1))
        return states.swapaxes(0, 1)


class LSTM(nn.Module):
    """Predicts the next token at every position of int [B, T].

    Layers are embed, lstm1, lstm2, ... and fc1.

    References: the Shakespeare model of Caldas et al., LEAF (2018), and of McMahan et al. (2017).
    Deviations: one layer of 64 units instead of two of 256, for training on a CPU.

    Args:
      embedding: Size of a token's embedding.
      hidden: Units of each LSTM layer.
      vocabulary: Number of tokens. Default: the number of outputs.
    """

    outputs: int = 80
    embedding: int = 8
    hidden: tuple[int, ...] = (64,)
    vocabulary: int | None = None
    head = "fc1"  # name of the last layer

    @property
    def layers(self) -> tuple[str, ...]:
        return ("embed", *(f"lstm{i}" for i in range(1, len(self.hidden) + 1)), self.head)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps int [B, T] to [B, T, outputs]; `train` and `mask` are ignored."""
        del train, mask
        x = nn.Embed(self.vocabulary or self.outputs, self.embedding, name="embed")(x)
        for i, hidden in enumerate(self.hidden, 1):
            x = LSTMLayer(hidden, name=f"lstm{i}")(x)
        return init.dense(x.shape[-1], self.outputs, self.head)(x)
