"""A federation so small that every algorithm runs on it in seconds, and a network to match."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import task
from fedjax_pfl.core.algorithm import Cohort, Federation
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.core.task import Task, regression
from fedjax_pfl.networks.normalisation import batch_norm

CLIENTS, FEATURES, HIDDEN, CLASSES = 6, 5, 8, 3
TRAIN = np.array([12, 7, 9, 12, 1, 10])  # ragged, one of them a single example
VALIDATION = np.array([4, 3, 4, 2, 4, 4])
TEST = np.array([5, 6, 4, 6, 3, 6])


HALF_SQUARES = Task(
    lambda outputs, y, classes: 0.5 * jnp.sum(jnp.square(outputs - y), -1),
    regression().metrics,
    has_classes=False,
)  # whose gradient by the outputs is outputs − y, which is what is worked out by hand


class Net(nn.Module):
    """Two dense layers with a BatchNorm between them, so that the first needs no bias."""

    outputs: int = CLASSES
    hidden: int = HIDDEN
    head = "fc2"
    layers = ("fc1", "norm1", "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        x = nn.Dense(self.hidden, use_bias=False, name="fc1")(x)
        x = batch_norm(x, train, mask, "norm1")
        return nn.Dense(self.outputs, name="fc2")(nn.relu(x))


def tables(counts: np.ndarray, first: int, longest: int, filler: int) -> tuple[Split, int]:
    """Consecutive rows for each client, padded with `filler`."""
    rows = np.full((len(counts), longest), filler, np.int32)
    for i, count in enumerate(counts):
        rows[i, :count] = np.arange(first, first + count)
        first += count
    return Split(rows, counts.astype(np.int32)), first


def federated(
    *, clients: int = CLIENTS, extra: int = 0, filler: int = 0, seed: int = 0, **changes: Any
) -> tuple[FederatedData, Federation]:
    """Learnable data for the first `clients` clients.

    Args:
      extra: columns of padding behind the longest client's examples.
      filler: row that the padding points to.
    """
    rng = np.random.default_rng(seed)
    total = int(TRAIN.sum() + VALIDATION.sum() + TEST.sum())
    y = rng.integers(0, CLASSES, total).astype(np.int32)
    centres = rng.normal(size=(CLASSES, FEATURES)) * 2
    x = (centres[y] + rng.normal(size=(total, FEATURES))).astype(np.float32)
    splits, first = [], 0
    for counts in (TRAIN, VALIDATION, TEST):
        split, first = tables(counts, first, counts.max() + extra, filler)
        splits.append(Split(split.rows[:clients], split.size[:clients]))
    data = FederatedData(x, y, *splits)._replace(**changes)
    federation = Federation(
        TRAIN[:clients],
        (FEATURES,),
        CLASSES,
        np.ones(clients, bool),
        np.zeros(clients, np.int32),
        VALIDATION[:clients],
    )
    return jax.device_put(data), federation


def cohort(counts: Any, ids: Any, arrived: Any, payloads: Any, uploads: Any, t: Any) -> Cohort:
    """As the simulation makes it; `ids` are out of range where a client did not arrive."""
    weights = jnp.asarray(counts, jnp.float32).at[ids].get(mode="fill", fill_value=0.0)
    return Cohort(ids, arrived, jnp.where(arrived, weights, 0.0), payloads, uploads, t)


LENGTH, TOKENS = 6, 5


def tokens(*, extra: int = 0, filler: int = 0) -> tuple[FederatedData, Federation]:
    """Tokens [B, T] that go on by one, or back by one, and of each the next; some have none."""
    data, federation = federated(extra=extra, filler=filler)
    rng = np.random.default_rng(4)
    n = data.x.shape[0]
    step = rng.choice([1, -1], (n, 1))
    x = (rng.integers(0, TOKENS, (n, 1)) + step * np.arange(LENGTH + 1)) % TOKENS
    lengths = rng.integers(2, LENGTH + 1, (n, 1))
    y = np.where(np.arange(LENGTH) < lengths, x[:, 1:], -1)
    made = data._replace(x=jnp.asarray(x[:, :-1], jnp.int32), y=jnp.asarray(y, jnp.int32))
    return made, federation._replace(
        input_shape=(LENGTH,),
        outputs=TOKENS,
        input_dtype="int32",
        positions=(LENGTH,),
        task=task.tokens(),
    )
