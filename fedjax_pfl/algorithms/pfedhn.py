"""pFedHN and pFedHN-PC: a hypernetwork on the server generates every client's model.

Shamsian et al., Personalized Federated Learning using Hypernetworks, 2021. With v_i the embedding
of client i, h(·; φ) the hypernetwork and J = ∂θ_i / ∂(φ, v):

  θ_i    = h(v_i; φ),  θ̃_i = local training from θ_i        (Algorithm 1)
  g      = Jᵀ (θ_i − θ̃_i), clipped over φ and all of v together
  m      ← .9 m + (g + decay · (φ, v))
  (φ, v) ← (φ, v) − η m

In PC (4) θ_i is all but the last layer; ω_i, the last one, is trained together with it and stays
with the client, and so does its momentum.

Deviations: Algorithm 1 subtracts Jᵀ (θ̃_i − θ_i), which leads away, in every local step; this is the
authors' code, once for each visit and towards θ̃_i. Clipping, momentum and decay are the code's too.
Its gradient of v is dense: momentum and decay also move clients that were not sampled, if they are
active. ω_i learns at the clients' rate, unclipped. BatchNorm's statistics stay with the clients.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from fedjax_pfl.algorithms.hypernetwork import Settings, generated
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import UsageError, need
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.core.task import Task


def pfedhn(
    models: Any,
    task: Task,
    training: Training,
    federation: Federation,
    *,
    rate: float = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 1e-3,
    clip_norm: float = 50.0,
    embedding: int | None = None,
    fixed: bool = False,
    width: int = 100,
    depth: int = 3,
    spectral_norm: bool = False,
    normalize: bool = False,
    embedding_rate: float = 1.0,
    average: bool = False,
    frozen: bool = False,
) -> Algorithm:
    """pFedHN: one hypernetwork generates the whole of every client's model.

    `models`: a network, or one for each group of clients: all from one hypernetwork.

    Args:
      rate, momentum, weight_decay: of the server's SGD, on the hypernetwork and the embeddings.
      clip_norm: largest norm of its gradient.
      embedding: e, how many numbers a client's embedding v_i has; unset: 1 + N // 4.
      fixed: v_i is the client's share of each class, p̂_i in section 5.3, and does not learn.
      width: outputs of the hypernetwork's layers before its heads; 0 makes it linear, θ_i = W v_i.
      depth: how many of those layers follow the first.
      spectral_norm: divide each weight of the hypernetwork by its largest singular value.
      normalize: bring what comes into each ReLU to mean 0 and deviation 1 over the layer.
      embedding_rate: the embeddings' gradient counts so many times, after clipping.
      average: take the mean over the clients of a round; else gradients are added, as if they came
        in turn.
      frozen: only embeddings learn: a later phase for clients that were held out.
    """
    shares = _shares("pfedhn", federation) if fixed else None
    chosen = Settings(
        rate,
        momentum,
        weight_decay,
        clip_norm,
        embedding,
        shares,
        width,
        depth,
        spectral_norm,
        normalize,
        embedding_rate,
        average,
        frozen,
    )
    _check("pfedhn", chosen)
    return generated("pfedhn", models, _nothing, task, training, federation, chosen)


def pfedhn_pc(
    models: Any,
    task: Task,
    training: Training,
    federation: Federation,
    *,
    rate: float = 5e-2,
    momentum: float = 0.9,
    weight_decay: float = 1e-3,
    clip_norm: float = 50.0,
    embedding: int | None = None,
    fixed: bool = False,
    width: int = 100,
    depth: int = 3,
    spectral_norm: bool = False,
    normalize: bool = False,
    embedding_rate: float = 1.0,
    average: bool = False,
    frozen: bool = False,
) -> Algorithm:
    """pFedHN-PC: pFedHN of all but the last layer, which stays with the client.

    `models`: a network, or one for each group of clients: all from one hypernetwork.

    Args:
      rate, momentum, weight_decay: of the server's SGD, on the hypernetwork and the embeddings.
      clip_norm: largest norm of its gradient.
      embedding: e, how many numbers a client's embedding v_i has; unset: 1 + N // 4.
      fixed: v_i is the client's share of each class, p̂_i in section 5.3, and does not learn.
      width: outputs of the hypernetwork's layers before its heads; 0 makes it linear, θ_i = W v_i.
      depth: how many of those layers follow the first.
      spectral_norm: divide each weight of the hypernetwork by its largest singular value.
      normalize: bring what comes into each ReLU to mean 0 and deviation 1 over the layer.
      embedding_rate: the embeddings' gradient counts so many times, after clipping.
      average: take the mean over the clients of a round; else gradients are added, as if they came
        in turn.
      frozen: only embeddings learn: a later phase for clients that were held out.
    """
    shares = _shares("pfedhn_pc", federation) if fixed else None
    chosen = Settings(
        rate,
        momentum,
        weight_decay,
        clip_norm,
        embedding,
        shares,
        width,
        depth,
        spectral_norm,
        normalize,
        embedding_rate,
        average,
        frozen,
    )
    _check("pfedhn_pc", chosen)
    return generated("pfedhn_pc", models, _head, task, training, federation, chosen)


def _nothing(model: Any) -> Collection[str]:
    return ()


def _head(model: Any) -> Collection[str]:
    return (model.head,)


def _shares(name: str, federation: Federation) -> np.ndarray:
    """p̂ [N, C]: each client's part of all training examples of a class."""
    if federation.class_counts is None:
        raise UsageError(f"{name}.fixed takes shares of classes, and this dataset has none")
    counts = federation.class_counts.astype(np.float32)
    return counts / np.maximum(counts.sum(0), 1)


def _check(name: str, chosen: Settings) -> None:
    for setting in ("momentum", "weight_decay", "width", "depth"):
        value = getattr(chosen, setting)
        need(value >= 0, f"{name}.{setting} is {value}; it must be at least 0")
    for setting in ("rate", "clip_norm", "embedding_rate"):
        value = getattr(chosen, setting)
        need(value > 0, f"{name}.{setting} is {value}; it must be above 0")
    need(chosen.momentum < 1, f"{name}.momentum is {chosen.momentum}; it must be below 1")
    length = chosen.embedding
    need(length is None or length >= 1, f"{name}.embedding is {length}; it must be at least 1")
    if chosen.fixed is not None and chosen.frozen:
        raise UsageError(f"{name}.fixed and {name}.frozen leave nothing to learn; choose one")
    if chosen.fixed is not None and chosen.embedding is not None:
        raise UsageError(f"{name}.fixed has one number per class; leave {name}.embedding unset")
