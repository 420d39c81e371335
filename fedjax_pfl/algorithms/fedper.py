"""FedPer: a shared body, a head for each client, and both trained together.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

Deviations: the personal part is the last layer; the paper also tries longer ones. The mean is over
the clients that took part, as in FedAvg.
"""

from typing import Any

from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import of_layers, partly_shared
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation


def fedper(model: Any, training: local_training.Training, federation: Federation) -> Algorithm:
    """(φ, ω_i) ← local SGD on both; φ ← Σ_k n_k φ_k / Σ_k n_k; the head ω_i stays.

    BatchNorm belongs to the body φ, statistics included.
    """
    return partly_shared(model, training, federation, of_layers({model.head}))


FEDPER = Method(fedper, title="FedPer", paper="Arivazhagan et al. 2019")
