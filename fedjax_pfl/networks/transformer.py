"""A language model with transformer blocks."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init


class Transformer(nn.Module):
    """Predicts the next token at every position of int [B, T], with causal attention.

    Layers are embed and positions, then a, qkv, proj, b, up and down of every block, named
    block1_a, block1_qkv, ..., then norm and fc1. A block computes
      x ← x + proj(attention(qkv(a(x))))
      x ← x + down(gelu(up(b(x))))
    The layers a, b and norm are LayerNorm.

    References: the decoder of Vaswani et al., Attention Is All You Need (2017), with normalisation
    before each part and learned positions, as in GPT-2.

    Args:
      width: Size of the representation of a position.
      blocks: Number of blocks.
      heads: Number of attention heads, which divide the width.
      dropout: Dropout rate of both parts of a block.
      vocabulary: Number of tokens. Default: the number of outputs.
    """

    outputs: int = 80
    width: int = 64
    blocks: int = 2
    heads: int = 4
    dropout: float = 0.0
    vocabulary: int | None = None
    head = "fc1"  # name of the last layer

    @property
    def layers(self) -> tuple[str, ...]:
        inner = ("a", "qkv", "proj", "b", "up", "down")
        blocks = (f"block{i}_{name}" for i in range(1, self.blocks + 1) for name in inner)
        return ("embed", "positions", *blocks, "norm", self.head)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps int [B, T] to [B, T, outputs]; `mask` is ignored."""
        del mask
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}; it must be a multiple of heads, {self.heads}")
        length, width = x.shape[1], self.width
        x = nn.Embed(self.vocabulary or self.outputs, width, name="embed")(x)
        x = x + nn.Embed(length, width, name="positions")(jnp.arange(length))[None]

        def drop(x: jax.Array, name: str) -> jax.Array:
            return nn.Dropout(self.dropout, deterministic=not train, name=name)(x)

        for i in range(1, self.blocks + 1):
            qkv = init.dense(width, 3 * width, f"block{i}_qkv")(nn.LayerNorm(name=f"block{i}_a")(x))
            attended = init.dense(width, width, f"block{i}_proj")(attention(qkv, self.heads))
            x = x + drop(attended, f"block{i}_drop1")
            up = init.dense(width, 4 * width, f"block{i}_up")(nn.LayerNorm(name=f"block{i}_b")(x))
            down = init.dense(4 * width, width, f"block{i}_down")(nn.gelu(up))
            x = x + drop(down, f"block{i}_drop2")
        return init.dense(width, self.outputs, self.head)(nn.LayerNorm(name="norm")(x))


def attention(qkv: jax.Array, heads: int) -> jax.Array:
    """Computes causal attention [B, T, D] from queries, keys and values [B, T, 3D], in this order.

    Each of the `heads` attends with D / heads of the D numbers.
    """
    batch, length, _ = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, -1), 2, 0)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    visible = jnp.tril(jnp.ones((1, 1, length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, logits, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, -1)
