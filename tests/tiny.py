"""The tiny federation of `fedjax_pfl.testing`, and helpers for tests."""

from typing import Any

import jax.numpy as jnp

from fedjax_pfl.core.algorithm import Cohort
from fedjax_pfl.core.task import Task, regression
from fedjax_pfl.testing.example import (
    CLASSES,
    CLIENTS,
    FEATURES,
    HIDDEN,
    LENGTH,
    TEST,
    TOKENS,
    TRAIN,
    VALIDATION,
)
from fedjax_pfl.testing.example import TinyNetwork as Net
from fedjax_pfl.testing.example import sequences as tokens
from fedjax_pfl.testing.example import vectors as federated

__all__ = [
    "CLASSES",
    "CLIENTS",
    "FEATURES",
    "HIDDEN",
    "LENGTH",
    "TEST",
    "TOKENS",
    "TRAIN",
    "VALIDATION",
    "Net",
    "cohort",
    "federated",
    "tokens",
]

# The gradient of this loss with respect to the outputs is outputs − y.
HALF_SQUARES = Task(
    lambda outputs, y, classes: 0.5 * jnp.sum(jnp.square(outputs - y), -1),
    regression().metrics,
    has_classes=False,
)


def cohort(counts: Any, ids: Any, arrived: Any, payloads: Any, uploads: Any, t: Any) -> Cohort:
    """Returns a cohort as the simulation builds it; ids of absent clients are out of range."""
    weights = jnp.asarray(counts, jnp.float32).at[ids].get(mode="fill", fill_value=0.0)
    return Cohort(ids, arrived, jnp.where(arrived, weights, 0.0), payloads, uploads, t)
