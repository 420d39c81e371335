"""Noise that is correlated between rounds: DP-FTRL with a banded Toeplitz matrix.

Kalinin and Lampert, Banded Square Root Matrix Factorization for Differentially Private Model
Training, 2024. Round t has the sum x_t of clipped updates, of norm at most C each. Released is

  x_t + s w_t,   w_t = z_t − Σ_{j=1}^{b−1} c_j w_{t−j},   c_j = binom(2 j, j) / 4^j,   s = z C

with z_t standard Gaussian and b bands. So C w = z with the lower triangular Toeplitz matrix C of
c_0 = 1, ..., c_{b−1}. With all bands C is the square root of the matrix of prefix sums. This nearly
minimises the mean over rounds of the squared error of the prefix sums x_0 + ... + x_t, that is the
noise in the models of all rounds. Fewer bands approximate it.

Guarantee, for clients that take part at most once in any b consecutive rounds (Choquette-Choo et
al., (Amplified) Banded Matrix Factorization, 2023):
1. y_t = Σ_{j<b} c_j (x_{t−j} + s w_{t−j}) = Σ_{j<b} c_j x_{t−j} + s z_t: the released values
   determine y_0, ..., y_t and the reverse, so ε of all y is ε of the run.
2. Given y_0, ..., y_{t−1}, replacing a client changes only the x of its rounds, by at most 2 C
   each. At most one of these is among the last b: y_t moves by at most 2 C c_j, or not at all.
3. Gaussian mechanisms that adapt to earlier ones compose as one whose squared sensitivity is the
   sum of theirs: k participations give at most (2 C)² k ‖c‖².
4. So the run is a Gaussian mechanism of noise multiplier s / (2 C √k ‖c‖) at most, for every order
   of the clients. Nothing is random but the noise, so sampling amplifies nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.transforms.privacy import clip_and_noise


class NoiseHistory(NamedTuple):
    """Noise of the last b − 1 rounds, from which the next noise is computed."""

    noise: PyTree  # float32, leaves [b - 1, ...]; round t is at index t modulo b - 1
    next_round: jax.Array  # int32: the first round without noise


def coefficients(bands: int) -> np.ndarray:
    """Returns c_0, ..., c_{b−1}, float64 [bands]."""
    return np.cumprod([1.0, *(1 - 0.5 / np.arange(1, bands))])


def squared_sensitivity(bands: int, sampled: int, population: int, rounds: int) -> float:
    """Returns the squared sensitivity of some rounds, if that of one participation alone is 1.

    The client at the first position takes part first, again in round ⌊m N / K⌋ for m = 1, 2, ...,
    and no client has a larger sensitivity. Of its last participation only the terms up to the last
    round count.

    Args:
      bands: Number of bands, b, at most ⌊N / K⌋.
      sampled: Clients per round, K.
      population: Clients that take part in turn, N.
      rounds: Number of finished rounds, at least 1.
    """
    participations = np.arange(0, rounds * sampled, population) // sampled
    norms = np.cumsum(coefficients(bands) ** 2)
    return float(np.sum(norms[np.minimum(bands, rounds - participations) - 1]))


def empty_history(model: PyTree, bands: int) -> NoiseHistory:
    """Returns the history before the first round; `model` has the shapes of the noise."""
    return NoiseHistory(
        noise=jax.tree.map(lambda leaf: jnp.zeros((bands - 1, *leaf.shape), jnp.float32), model),
        next_round=jnp.int32(0),
    )


def advance(
    history: NoiseHistory, t: Any, key: jax.Array, bands: int
) -> tuple[PyTree, NoiseHistory]:
    """Returns the noise of round `t`, w_t, and the history with it.

    A round without updates has no call. Its noise is computed afterwards and released
    nowhere: without it, participations would be closer together.
    """
    length = bands - 1
    weights = jnp.asarray(coefficients(bands)[1:], jnp.float32)

    def step(r: Any, noise: PyTree) -> PyTree:
        slot = r % length
        by_slot = weights[(slot - 1 - jnp.arange(length)) % length]  # c_j for the noise of r - j
        carried_over = jax.tree.map(
            lambda leaf: -jnp.tensordot(by_slot, leaf, axes=1, precision="highest"), noise
        )
        new = clip_and_noise.add_noise(carried_over, 1.0, jax.random.fold_in(key, r))
        return jax.tree.map(lambda leaf, row: leaf.at[slot].set(row), noise, new)

    t = jnp.asarray(t, jnp.int32)
    noise = jax.lax.fori_loop(jnp.minimum(history.next_round, t), t + 1, step, history.noise)
    return jax.tree.map(lambda leaf: leaf[t % length], noise), NoiseHistory(noise, t + 1)
