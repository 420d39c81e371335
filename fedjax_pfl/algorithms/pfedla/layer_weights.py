"""pFedLA's hypernetwork: the mixing weights of one client."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init

NORMALISE = ("relu", "softmax")


class LayerWeights(nn.Module):
    """Embedding, hidden layers with ReLU and one head per model layer: () -> raw weights [L, N].

    `normalised` turns the raw weights into alpha. With "relu" the kernels of the heads start at
    U(0, 1), so alpha starts near 1/N; with "softmax" the heads start at zero and alpha at
    exactly 1/N.

    Reference: Ma et al., Layer-wise Model Aggregation for Personalized Federated Learning (2022),
    Section 3.2: several fully connected layers, one of them for each model layer. The paper gives
    no sizes; the defaults are those of public re-implementations.
    """

    clients: int  # number of models to mix: N, or M with candidates
    layers: int  # L
    embedding: int = 100  # length of the embedding
    hidden: int = 100  # units of each hidden layer
    depth: int = 3  # number of hidden layers
    normalise: str = "softmax"  # or "relu"; here it only chooses the heads' initial values

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the raw weights [L, N], before `normalised`."""
        x = self.param("embedding", nn.initializers.normal(1.0), (self.embedding,))
        for i in range(1, self.depth + 1):
            x = nn.relu(init.dense(x.shape[-1], self.hidden, f"hidden{i}")(x))
        first = nn.initializers.uniform(1.0) if self.normalise == "relu" else nn.initializers.zeros
        bias = init.uniform(x.shape[-1]) if self.normalise == "relu" else nn.initializers.zeros
        rows = [
            nn.Dense(self.clients, kernel_init=first, bias_init=bias, name=f"head{i:03d}")(x)
            for i in range(self.layers)
        ]
        return jnp.stack(rows)


def normalised(
    raw: jax.Array, own_column: jax.Array, allowed: jax.Array, normalise: str
) -> jax.Array:
    """Turns one client's raw weights into alpha, whose rows sum to 1. Returns shape [L, N].

    Args:
      raw: Raw weights of shape [L, N].
      own_column: Column of the client's own model. A row without a positive weight becomes
        one-hot there.
      allowed: Bool array of shape [N]; all other columns get the weight 0.
      normalise: "softmax", or "relu" for relu(raw) / sum(relu(raw)).
    """
    if normalise == "softmax":
        return jax.nn.softmax(jnp.where(allowed, raw, -jnp.inf), axis=-1)
    positive = jnp.where(allowed, nn.relu(raw), 0.0)
    total = jnp.sum(positive, axis=-1, keepdims=True)
    alive = total > 0
    # The inner where keeps the division, and with it the gradient, finite where it is not used.
    shares = positive / jnp.where(alive, total, 1.0)
    return jnp.where(alive, shares, jax.nn.one_hot(own_column, raw.shape[-1]))
