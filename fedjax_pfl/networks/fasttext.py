"""A text classifier that averages the embeddings of tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init


class FastText(nn.Module):
    """Classifies int [B, T] by the mean embedding of its tokens, without those that are 0.

    Layers are embed and fc1. Without any token the mean is 0.

    References: Joulin et al., Bag of Tricks for Efficient Text Classification (2017).
    Deviations: a softmax over all classes instead of a hierarchical one, and no n-grams.

    Args:
      embedding: Size of a token's embedding.
      vocabulary: Number of tokens.
    """

    outputs: int = 4
    embedding: int = 32
    vocabulary: int = 10_000
    layers = ("embed", "fc1")  # names of all layers, from the input to the output
    head = "fc1"  # name of the last layer

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps int [B, T] to [B, outputs]; `train` and `mask` are ignored."""
        del train, mask
        embedded = nn.Embed(self.vocabulary, self.embedding, name="embed")(x)
        is_token = (x > 0)[..., None].astype(embedded.dtype)
        mean = (embedded * is_token).sum(1) / jnp.maximum(is_token.sum(1), 1)
        return init.dense(self.embedding, self.outputs, self.head)(mean)
