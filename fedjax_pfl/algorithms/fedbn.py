"""FedBN: FedAvg of all layers except BatchNorm, which stays on the client.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021.

Deviations: the mean is weighted by examples, as in FedAvg. A client that has never trained is
served the shared layers with the initial BatchNorm.
"""

from typing import Any

from fedjax_pfl.algorithms.shared.initial_state import model_shapes
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import in_layers, partly_shared
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import norm_layers


def fedbn(model: Any, training: local_training.Training, federation: Federation) -> Algorithm:
    """Creates FedBN: FedAvg in which scale, bias and statistics of BatchNorm stay on the client.

    A layer is a BatchNorm if it has batch statistics; its name does not matter. Raises UsageError
    if the network has none. Clients store `SplitClient`.
    """
    norms = norm_layers(model_shapes(model, federation))
    if not norms:
        raise UsageError(
            f"fedbn needs a network with BatchNorm, and this {type(model).__name__} has none; "
            "set batch_norm, as in model=lenet with lenet.batch_norm=True"
        )
    return partly_shared(model, training, federation, in_layers(norms))


FEDBN = Method(fedbn, title="FedBN", paper="Li et al. 2021")
