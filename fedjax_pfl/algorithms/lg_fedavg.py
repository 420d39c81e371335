"""LG-FedAvg: early layers stay with the client, the last layers are averaged.

Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations,
2020. The paper goes on from a FedAvg run: put a phase of fedavg first.

Deviations: none in the method. The authors' commands share 2 of 5 layers on CIFAR10; the default
here, as in their code, is the head alone, which every network can do.
"""

from typing import Any

from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import last_layers, of_layers, partly_shared
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation


def lg_fedavg(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    shared_layers: int = 1,
) -> Algorithm:
    """(θ_i, w) ← local SGD on both; w ← Σ_k n_k w_k / Σ_k n_k; the early layers θ_i stay.

    Args:
      shared_layers: how many of the last layers are averaged. A BatchNorm is not counted and goes
        with the layer before it, statistics included.
    """
    late = last_layers(model, federation, "lg_fedavg.shared_layers", shared_layers, early=1)
    own = of_layers([layer for layer in model.layers if layer not in late])
    return partly_shared(model, training, federation, own)


LG_FEDAVG = Method(lg_fedavg, title="LG-FedAvg", paper="Liang et al. 2020")
