"""FedBN: FedAvg on everything but BatchNorm, which stays with the client.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021.

Deviations: the mean is weighted by examples, as in FedAvg. A client that has never trained is
served the shared layers with BatchNorm as it started.
"""

from typing import Any

from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import of_layers, partly_shared
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import norm_layers


def fedbn(model: Any, training: local_training.Training, federation: Federation) -> Algorithm:
    """w ← Σ_k n_k w_k / Σ_k n_k for all but scale, bias, mean and variance of each BatchNorm.

    A layer is BatchNorm when it keeps batch statistics, whatever it is called.
    """
    norms = norm_layers(common.shapes(model, federation))
    if not norms:
        raise UsageError(
            f"fedbn needs a network with BatchNorm, and this {type(model).__name__} has none; "
            "set batch_norm, as in model=lenet with lenet.batch_norm=True"
        )
    return partly_shared(model, training, federation, of_layers(norms))


FEDBN = Method(fedbn, title="FedBN", paper="Li et al. 2021")
