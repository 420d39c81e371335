"""FedPer: a shared body and a personal head, trained together.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

Deviations: the personal part is the last layer; the paper also tries several. All heads start
equal; in the paper each client draws its own. The mean is over the clients that returned an update,
as in FedAvg.
"""

from typing import Any

from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import in_layers, partly_shared
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation


def fedper(model: Any, training: local_training.Training, federation: Federation) -> Algorithm:
    """Creates FedPer: clients train body and head together, and the server averages the bodies.

    The mean is weighted by training examples. The head, the last layer, stays on the client.
    BatchNorm belongs to the body, statistics included.
    """
    return partly_shared(model, training, federation, in_layers({model.head}))


FEDPER = Method(fedper, title="FedPer", paper="Arivazhagan et al. 2019")
