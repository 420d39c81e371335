"""LG-FedAvg: early layers stay on the client, the last layers are averaged.

Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations,
2020. The paper starts from a FedAvg run: configure a phase of fedavg before it.

Deviations: the mean is weighted by examples, in the authors' code it is unweighted. Their code
shares the head of the MNIST network by default. On CIFAR10 it counts layers from the other end and
keeps the dense layers, against the paper's text, which is followed here.
"""

from typing import Any

from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import in_layers, last_layers, partly_shared
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation


def lg_fedavg(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    shared_layers: int = 1,
) -> Algorithm:
    """Creates LG-FedAvg: clients train all layers, and the server averages the last ones.

    The mean is weighted by training examples. The early layers stay on the client.

    Args:
      shared_layers: Number of the last layers that are averaged. A BatchNorm is not counted; it
        belongs to the layer before it, statistics included.
    """
    late = last_layers(model, federation, "lg_fedavg.shared_layers", shared_layers, early=1)
    early = [layer for layer in model.layers if layer not in late]
    return partly_shared(model, training, federation, in_layers(early))


LG_FEDAVG = Method(lg_fedavg, title="LG-FedAvg", paper="Liang et al. 2020")
