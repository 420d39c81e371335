"""The settings that pFedHN and pFedHN-PC have in common, said once, and the server's optimiser."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import MOST_LAYERS, UsageError, above, at_least, need

# Numbers in an embedding, where nothing is said. The layer that reads them has 100 outputs, so that
# more tell it nothing; and 1 + N // 4 of them for each of N clients grow with N².
_MOST = 100


class Settings(NamedTuple):
    """Of the hypernetwork, and of how the server trains it.

    Args:
      rate, momentum, weight_decay: of the server's SGD, on the hypernetwork and the embeddings.
      clip_norm: largest norm of its gradient.
      embedding: e, how many numbers a client's embedding v_i has; unset: 1 + N // 4, 100 at
        most.
      fixed: v_i is the client's share of each class, p̂_i in section 5.3, and does not learn.
      width: outputs of the hypernetwork's layers before its heads; 0 makes it linear, θ_i = W v_i.
      depth: how many of those layers follow the first.
      spectral_norm: divide each weight of the hypernetwork by its largest singular value.
      normalize: an odd function before the heads: tanh of mean 0 and deviation 1, without biases.
      embedding_rate: the embeddings' gradient counts so many times, after clipping.
      average: take the mean over the clients of a round; else gradients are added, as if they came
        in turn.
      frozen: only embeddings learn: a later phase for clients that were held out.
    """

    rate: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 1e-3
    clip_norm: float = 50.0
    embedding: int | None = None
    fixed: bool = False
    width: int = 100
    depth: int = 3
    spectral_norm: bool = False
    normalize: bool = False
    embedding_rate: float = 1.0
    average: bool = False
    frozen: bool = False


def with_settings(
    **changed: Any,
) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Decorates f(models, task, training, federation, settings): a factory as all others are.

    It has the fields of `Settings` as keyword-only arguments, with the defaults that are `changed`
    here, and says what they mean.
    """
    usual, hints = Settings(**changed), typing.get_type_hints(Settings)
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hints[name]
        )
        for name, value in usual._asdict().items()
    ]

    def decorate(factory: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        *taken, _ = inspect.signature(factory).parameters.values()
        annotations = {**typing.get_type_hints(factory), **hints}
        annotations.pop("settings")

        @functools.wraps(factory)
        def made(
            models: Any, task: Any, training: Any, federation: Federation, **given: Any
        ) -> Algorithm:
            settings = usual._replace(**given)
            _check(factory.__name__, settings)
            return factory(models, task, training, federation, settings)

        signature = inspect.Signature([*taken, *keywords])
        made.__signature__ = signature  # type: ignore[attr-defined]
        made.__annotations__ = annotations
        said = (inspect.getdoc(Settings) or "").partition("\n\n")[2]
        made.__doc__ = f"{inspect.getdoc(factory)}\n\n{said}"
        return made

    return decorate


def _check(name: str, settings: Settings) -> None:
    depth = settings.depth
    need(0 <= depth <= MOST_LAYERS, f"{name}.depth is {depth}; choose 0 to {MOST_LAYERS}")
    at_least(f"{name}.width", settings.width, 0)
    for setting in ("momentum", "weight_decay"):
        at_least(f"{name}.{setting}", getattr(settings, setting), 0)
    for setting in ("rate", "clip_norm", "embedding_rate"):
        above(f"{name}.{setting}", getattr(settings, setting), 0)
    need(settings.momentum < 1, f"{name}.momentum is {settings.momentum}; it must be below 1")
    at_least(f"{name}.embedding", settings.embedding, 1)
    if settings.fixed and settings.frozen:
        raise UsageError(f"{name}.fixed and {name}.frozen leave nothing to learn; choose one")
    if settings.fixed and settings.embedding is not None:
        raise UsageError(f"{name}.fixed has one number per class; leave {name}.embedding unset")


def embedding_of(settings: Settings, clients: int) -> int:
    """How many numbers the embedding of each of so many clients has."""
    return settings.embedding or min(1 + clients // 4, _MOST)


def remark(name: str, own: Mapping[str, Any], clients: int) -> str:
    """A line where embeddings are shorter than the authors' code would make them; else nothing."""
    usual = 1 + clients // 4
    if own["embedding"] or own["fixed"] or usual <= _MOST:
        return ""
    return (
        f"embeddings of {clients} clients have {_MOST} numbers each; {name}.embedding={usual} is "
        "what the authors' code has"
    )


def class_shares(name: str, federation: Federation) -> np.ndarray:
    """p̂ [N, C]: each client's part of all training examples of a class."""
    if federation.class_counts is None:
        raise UsageError(f"{name}.fixed takes shares of classes, and this dataset has none")
    counts = federation.class_counts.astype(np.float32)
    return counts / np.maximum(counts.sum(0), 1)


def server_optimizer(settings: Settings, active: jax.Array) -> optax.GradientTransformation:
    """SGD of {"phi": φ, "v": [N, e]}, or of one of them; embeddings that are not active stay."""

    def faster(updates: Any, params: Any) -> Any:
        """Before the decay, which stays as slow as it is."""
        times = settings.embedding_rate
        return {k: times * u if k == "v" else u for k, u in updates.items()}

    def only_active(updates: Any, params: Any) -> Any:
        return {
            k: jnp.where(active[:, None], u, 0.0) if k == "v" else u for k, u in updates.items()
        }

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.stateless(faster),
        optax.add_decayed_weights(settings.weight_decay),
        optax.stateless(only_active),
        optax.trace(settings.momentum),
        optax.scale(-settings.rate),
    )
