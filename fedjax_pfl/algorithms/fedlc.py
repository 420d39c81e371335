"""FedLC: local training with logits that are calibrated by the client's number of examples a class.

Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, 2022. With
n_kc of client k's training examples of class c, and logits f_c(x):

  a_c(x) = f_c(x) − τ n_kc^(−1/4)
  w_k ← w_k − η ∇ mean_x −log(exp(a_y(x)) / Σ_c exp(a_c(x))), from w;   w ← Σ_k n_k w_k / Σ_k n_k
A class with few examples gets a large margin to the others. A class without examples has a_c = −∞,
so it is not part of the sum. A client is served w, without calibration.

Deviations: the paper's sum leaves out c = y. That loss has no lower bound, and no value on a client
with a single class. Here c = y is included, so the loss is the cross-entropy of the calibrated
logits. The paper gives no value of τ.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.class_features import class_counts
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, Federation, PyTree
from fedjax_pfl.core.errors import UsageError, require_at_least


def fedlc(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    tau: float = 1.0,
) -> Algorithm:
    """Creates FedLC, for classification: FedAvg with a margin for each class in the local loss.

    A class with few examples on a client gets a large margin. State and mean are those of FedAvg.

    Args:
      tau: τ, the weight of the margins; 0 is FedAvg, whose loss includes all classes.
    """
    require_at_least("fedlc.tau", tau, 0)
    task = federation.task
    if not task.has_classes:
        raise UsageError("fedlc calibrates the logits of classes; choose a dataset with classes")

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        counts = class_counts(ctx.data, federation.outputs)
        margins = tau * jnp.maximum(counts, 1.0) ** -0.25
        included = (counts > 0) | (tau == 0)

        def calibrated_loss(outputs: jax.Array, y: jax.Array, classes: Any) -> jax.Array:
            allowed = included if classes is None else classes & included
            return task.loss(outputs - margins[None], y, allowed)

        calibrated_task = task._replace(loss=calibrated_loss)
        gradient = local_training.gradient(model, calibrated_task, ctx.data)
        variables, momentum, metrics = fit_variables(training, gradient, payload, client, ctx)
        return ClientResult(upload=variables, variables=variables, client=momentum, metrics=metrics)

    return fedavg(model, training, federation)._replace(train=train)


FEDLC = Method(fedlc, title="FedLC", paper="Zhang et al. 2022")
