"""A small transformer that predicts the next token."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init


class Transformer(nn.Module):
    """Tokens int [B, T] to logits of the token that follows each; no position sees a later one.

    embed and positions, then in block i norm, attention and a perceptron, each around a sum:
    x + proj_i(attention(qkv_i(a_i(x)))), x + down_i(gelu(up_i(b_i(x)))); then norm and fc1. Called
    block1_a, block1_qkv, block1_proj, block1_b, block1_up, block1_down, ... Norms are LayerNorm.

    References: the decoder of Vaswani et al., Attention Is All You Need (2017), with the norm first
    and learned positions, as GPT-2 has them.

    Args:
      width: numbers for each position.
      blocks: how many there are.
      heads: of attention, which share the width.
      dropout: share that is dropped of what each sum adds, in training.
      vocabulary: how many tokens there are; unset: as many as outputs.
    """

    outputs: int = 80
    width: int = 64
    blocks: int = 2
    heads: int = 4
    dropout: float = 0.0
    vocabulary: int | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, from the input to the output."""
        inner = ("a", "qkv", "proj", "b", "up", "down")
        blocks = (f"block{i}_{name}" for i in range(1, self.blocks + 1) for name in inner)
        return ("embed", "positions", *blocks, "norm", self.head)

    @property
    def head(self) -> str:
        """Name of the last layer, the one that knows the classes."""
        return "fc1"

    @nn.compact
    def __call__(
        self, x: jax.Array, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """int [B, T] -> [B, T, outputs]; `mask` changes nothing here."""
        del mask
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads")
        length, width = x.shape[1], self.width
        x = nn.Embed(self.vocabulary or self.outputs, width, name="embed")(x)
        x = x + nn.Embed(length, width, name="positions")(jnp.arange(length))[None]

        def drop(x: jax.Array, name: str) -> jax.Array:
            return nn.Dropout(self.dropout, deterministic=not train, name=name)(x)

        for i in range(1, self.blocks + 1):
            qkv = init.dense(width, 3 * width, f"block{i}_qkv")(nn.LayerNorm(name=f"block{i}_a")(x))
            heard = init.dense(width, width, f"block{i}_proj")(attention(qkv, self.heads))
            x = x + drop(heard, f"block{i}_drop1")
            up = init.dense(width, 4 * width, f"block{i}_up")(nn.LayerNorm(name=f"block{i}_b")(x))
            down = init.dense(4 * width, width, f"block{i}_down")(nn.gelu(up))
            x = x + drop(down, f"block{i}_drop2")
        return init.dense(width, self.outputs, self.head)(nn.LayerNorm(name="norm")(x))


def attention(qkv: jax.Array, heads: int) -> jax.Array:
    """softmax(q kᵀ / √d) v over earlier positions and its own: [B, T, 3D] -> [B, T, D]."""
    batch, length, _ = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    earlier = jnp.tril(jnp.ones((1, 1, length, length), bool))
    shares = jax.nn.softmax(jnp.where(earlier, scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(batch, length, -1)
