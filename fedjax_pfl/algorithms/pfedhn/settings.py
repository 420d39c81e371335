"""Settings of pFedHN and pFedHN-PC, and what follows from them alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import MAX_LAYERS, UsageError, require, require_above, require_at_least


class Settings(NamedTuple):
    """Settings of pFedHN's hypernetwork and of its training; `pfedhn` describes them in full."""

    rate: float  # learning rate of the server's SGD
    momentum: float  # of the server's SGD
    weight_decay: float  # of the server's SGD
    clip_norm: float  # largest norm of the server's gradient
    embedding: int | None  # length of an embedding; None: 1 + N // 4
    fixed: bool  # embeddings are class shares and are not trained
    width: int  # units of each hidden layer; 0: a linear hypernetwork
    depth: int  # number of hidden layers with ReLU
    spectral_norm: bool  # divide weight matrices by their largest singular value
    average: bool  # average the gradients of a round's clients, not add them
    frozen: bool  # train the embeddings alone
    first_round: int  # first round of the phase


def check_settings(name: str, settings: Settings) -> None:
    """Raises UsageError for settings out of range; `name` is the method's, for the message."""
    depth = settings.depth
    require(0 <= depth <= MAX_LAYERS, f"{name}.depth is {depth}; choose 0 to {MAX_LAYERS}")
    require_at_least(f"{name}.width", settings.width, 0)
    for setting in ("momentum", "weight_decay"):
        require_at_least(f"{name}.{setting}", getattr(settings, setting), 0)
    for setting in ("rate", "clip_norm"):
        require_above(f"{name}.{setting}", getattr(settings, setting), 0)
    require(settings.momentum < 1, f"{name}.momentum is {settings.momentum}; it must be below 1")
    require_at_least(f"{name}.embedding", settings.embedding, 1)
    if settings.fixed and settings.frozen:
        raise UsageError(f"{name}.fixed and {name}.frozen leave nothing to learn; choose one")
    if settings.fixed and settings.embedding is not None:
        raise UsageError(f"{name}.fixed has one number per class; leave {name}.embedding unset")


def embedding_length(settings: Settings, clients: int) -> int:
    """Returns `settings.embedding`, or 1 + N // 4 for N clients if that is None."""
    return settings.embedding or 1 + clients // 4


def remark(name: str, settings: Mapping[str, Any], clients: int) -> str:
    """Returns a line on the embeddings' memory, or "" if they are no longer than a layer.

    Args:
      name: The method's name.
      settings: The method's settings.
      clients: Number of clients N. Embeddings of the paper's length 1 + N // 4 grow with N².
    """
    length, width = 1 + clients // 4, settings["width"]
    if settings["embedding"] or settings["fixed"] or length <= width:
        return ""

    def megabytes(numbers: int) -> str:
        return f"{2 * 4 * numbers * clients / 1e6:,.1f} MB"

    line = (
        f"embeddings of {clients:,} clients have {length:,} numbers each, "
        f"{megabytes(length)} with their momentum"
    )
    return f"{line}; {name}.embedding={width} needs {megabytes(width)}" if width else line


def class_shares(name: str, federation: Federation) -> np.ndarray:
    """Returns [N, C]: each client's training examples of a class, relative to all active clients'.

    The share of a held-out client can exceed 1. It is 0 for a class that no active client has.
    Raises UsageError, with the method's `name`, if there are no classes.
    """
    if federation.class_counts is None:
        raise UsageError(
            f"{name}.fixed takes each client's shares of classes, which are unknown here; "
            "simulate a dataset with classes, without own_partitions and privacy"
        )
    counts = federation.class_counts.astype(np.float32)
    total = counts[federation.active].sum(0)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)


def server_sgd(settings: Settings, active: jax.Array) -> optax.GradientTransformation:
    """Returns the server's SGD, for parameters {"phi": φ, "v": [N, e]} or one of the two.

    Rows of v where `active`, bool [N], is False do not move.
    """

    def only_active(updates: Any, params: Any) -> Any:
        return {
            k: jnp.where(active[:, None], u, 0.0) if k == "v" else u for k, u in updates.items()
        }

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.add_decayed_weights(settings.weight_decay),
        optax.stateless(only_active),
        optax.trace(settings.momentum),
        optax.scale(-settings.rate),
    )
