"""A federation so small that every method runs on it in seconds, and a network to match."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import local_training, task
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.networks.normalisation import BatchNorm

CLIENTS, FEATURES, HIDDEN, CLASSES = 6, 5, 8, 3
# No batch of four has fewer than three examples: BatchNorm of a batch with one magnifies a rounding
# of 1e-7 to more than the tolerances.
TRAIN = np.array([12, 7, 12, 12, 3, 11])
VALIDATION = np.array([4, 3, 4, 2, 4, 4])
TEST = np.array([5, 6, 4, 6, 3, 6])
LENGTH, TOKENS = 6, 5  # of sequences


class TinyNetwork(nn.Module):
    """Two dense layers with BatchNorm between them, so the first needs no bias."""

    outputs: int = CLASSES
    hidden: int = HIDDEN
    head = "fc2"  # name of the last layer
    layers = ("fc1", "norm1", "fc2")  # names, from the input to the output

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        """Maps [B, features] to [B, outputs]; `mask` is bool [B], False for padding."""
        x = nn.Dense(self.hidden, use_bias=False, name="fc1")(x)
        x = BatchNorm(name="norm1")(x, train, mask)
        return nn.Dense(self.outputs, name="fc2")(nn.relu(x))


def training(**changes: Any) -> local_training.Training:
    """Returns local SGD with momentum kept by clients, decay, clipping and a short last batch.

    `changes` replace arguments of `local_training.sgd`.
    """
    settings = {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "clip_norm": 5.0,
        "batch_size": 4,
        "epochs": 2,
        "keep_optimizer": True,
    }
    return local_training.sgd(**{**settings, **changes})


def split_of(counts: np.ndarray, first: int, width: int, filler: int) -> tuple[Split, int]:
    """Gives each client consecutive rows of the examples, starting at row `first`.

    Returns the split, whose rows [clients, width] are padded with the row number `filler`, and the
    next free row. `counts` [clients] are the clients' numbers of examples.
    """
    rows = np.full((len(counts), width), filler, np.int32)
    for i, count in enumerate(counts):
        rows[i, :count] = np.arange(first, first + count)
        first += count
    return Split(rows, counts.astype(np.int32)), first


def vectors(
    *,
    clients: int = CLIENTS,
    counts: np.ndarray = TRAIN,
    extra: int = 0,
    filler: int = 0,
    seed: int = 0,
    **changes: Any,
) -> tuple[FederatedData, Federation]:
    """Returns data and federation of at most 6 clients with vectors of three classes.

    They are always the first clients, with the same examples, `counts` [6] of them for training.
    `extra` columns of padding, which refer to row `filler`, follow the longest client's examples.
    `changes` are fields of `FederatedData` to replace.
    """
    rng = np.random.default_rng(seed)
    total = int(counts.sum() + VALIDATION.sum() + TEST.sum())
    y = rng.integers(0, CLASSES, total).astype(np.int32)
    centres = rng.normal(size=(CLASSES, FEATURES)) * 2
    x = (centres[y] + rng.normal(size=(total, FEATURES))).astype(np.float32)
    splits, first = [], 0
    for sizes in (counts, VALIDATION, TEST):
        split, first = split_of(sizes, first, sizes.max() + extra, filler)
        splits.append(Split(split.rows[:clients], split.size[:clients]))
    data = FederatedData(x, y, *splits)._replace(**changes)
    federation = Federation(
        counts=counts[:clients],
        input_shape=(FEATURES,),
        outputs=CLASSES,
        active=np.ones(clients, bool),
        groups=np.zeros(clients, np.int32),
        validation_counts=VALIDATION[:clients],
    )
    return jax.device_put(data), federation


def sequences(*, extra: int = 0, filler: int = 0) -> tuple[FederatedData, Federation]:
    """Returns data and federation with tokens x [B, T] that count up or down.

    Labels y [B, T] are the next tokens, -1 from a random length on. `extra` and `filler` are those
    of `vectors`.
    """
    data, federation = vectors(extra=extra, filler=filler)
    rng = np.random.default_rng(4)
    n = data.x.shape[0]
    step = rng.choice([1, -1], (n, 1))
    x = (rng.integers(0, TOKENS, (n, 1)) + step * np.arange(LENGTH + 1)) % TOKENS
    lengths = rng.integers(2, LENGTH + 1, (n, 1))
    y = np.where(np.arange(LENGTH) < lengths, x[:, 1:], -1)
    data = data._replace(x=jnp.asarray(x[:, :-1], jnp.int32), y=jnp.asarray(y, jnp.int32))
    return data, federation._replace(
        input_shape=(LENGTH,),
        outputs=TOKENS,
        input_dtype="int32",
        positions=(LENGTH,),
        task=task.tokens(),
    )
