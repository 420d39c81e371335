"""pFedLA's hypernetwork: one client's weights of everybody's layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.networks import init

NORMALISE = ("relu", "softmax")


class LayerWeights(nn.Module):
    """An embedding, hidden layers with ReLU, and one head per model layer: () -> raw [L, N].

    `normalise` makes α of the raw rows. With "relu" the heads' weights start at U(0, 1), so that
    the rows of α start near 1/N; with "softmax" the heads start at zero and α at exactly 1/N.

    References: Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning (2022),
    section 3.2, which leaves sizes open; those of its public re-implementations are the defaults.
    """

    clients: int
    layers: int
    embedding: int = 100
    hidden: int = 100
    depth: int = 3
    normalise: str = "softmax"

    @nn.compact
    def __call__(self) -> jax.Array:
        """The raw rows, before `alpha`."""
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


def alpha(raw: jax.Array, own: jax.Array, allowed: jax.Array, normalise: str) -> jax.Array:
    """Rows that sum to 1 over the clients that are allowed.

    Args:
      raw: [L, N].
      own: int, the client itself. A row that is zero everywhere becomes its own model's.
      allowed: bool [N]; the others weigh nothing.
      normalise: "relu" for relu(raw)/Σ, or "softmax".
    """
    if normalise == "softmax":
        return jax.nn.softmax(jnp.where(allowed, raw, -jnp.inf), axis=-1)
    positive = jnp.where(allowed, nn.relu(raw), 0.0)
    total = jnp.sum(positive, axis=-1, keepdims=True)
    alive = total > 0
    # The inner where keeps the division, and with it the gradient, finite where it is not used.
    shares = positive / jnp.where(alive, total, 1.0)
    return jnp.where(alive, shares, jax.nn.one_hot(own, raw.shape[-1]))
