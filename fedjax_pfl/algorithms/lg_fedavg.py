"""LG-FedAvg: early layers stay with the client, the last layers are averaged.

Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations,
2020. The paper goes on from a FedAvg run: put a phase of fedavg first.

Deviations: none in the method. The authors' commands share 2 of 5 layers on CIFAR10; the default
here, as in their code, is the head alone, which every network can do.
"""

from typing import Any

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.split_model import of_layers, partly_shared
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import need
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks import norm_layers


def lg_fedavg(
    model: Any,
    task: Task,
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
    norms = norm_layers(common.shapes(model, federation))
    counted = [layer for layer in model.layers if layer not in norms]
    most = max(len(counted) - 1, 1)
    need(
        1 <= shared_layers <= most,
        f"lg_fedavg.shared_layers is {shared_layers}, and the network has {len(counted)} "
        f"layers besides BatchNorm; choose 1 to {most}",
    )
    early = model.layers[: model.layers.index(counted[-shared_layers])]
    return partly_shared(model, task, training, federation, of_layers(early))
