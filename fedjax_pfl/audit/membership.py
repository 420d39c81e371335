"""Membership inference by the loss: training examples tend to have a lower loss than others.

Yeom et al., Privacy Risk in Machine Learning, 2018. The threshold is calibrated with examples that
the model was not trained on. The stronger likelihood-ratio attack LiRA, which trains many models
for comparison, is left out.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.examples import ClientData, Split, take
from fedjax_pfl.core.task import Task


def auc(members: np.ndarray, non_members: np.ndarray) -> float:
    """Computes P(loss of a member < loss of another example), where equal losses count half.

    It is 0.5 if losses tell nothing, and 1 if they separate members from the others.
    """
    ordered = np.sort(non_members)
    not_above = np.searchsorted(ordered, members, "right")
    below = np.searchsorted(ordered, members, "left")
    return float(np.mean(1 - (below + not_above) / (2 * len(ordered))))


def tpr_at_fpr(members: np.ndarray, non_members: np.ndarray, fpr: float = 0.01) -> float:
    """Computes the largest share of members below a threshold with at most `fpr` of the others.

    With fewer than 1 / fpr other examples, all of them lie above the threshold.
    """
    threshold = np.sort(non_members)[int(fpr * len(non_members) + 1e-9)]
    return float(np.mean(members < threshold))


def loss_function(
    predict: Callable[[PyTree, jax.Array], jax.Array], task: Task
) -> Callable[[PyTree, ClientData, Split], np.ndarray]:
    """Returns a function (variables, data of a client, split) -> losses of its examples [n].

    `predict` is (variables, x [B, ...]) -> outputs.
    """

    @jax.jit
    def row_losses(variables: PyTree, data: ClientData, rows: jax.Array) -> jax.Array:
        def loss(row: jax.Array) -> jax.Array:
            batch = take(data, row[None], np.ones(1, bool))
            return task.loss(predict(variables, batch.x), batch.y, data.classes)[0]

        return jax.lax.map(loss, rows, batch_size=128)

    def losses(variables: PyTree, data: ClientData, split: Split) -> np.ndarray:
        values: Any = jax.device_get(row_losses(variables, data, split.rows))
        return values[: int(split.size)]

    return losses
