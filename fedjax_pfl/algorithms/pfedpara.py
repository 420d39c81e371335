"""pFedPara: kernels are W1 ⊙ (W2 + 1), with a shared W1 and a personal W2.

Hyeon-Woo, Ye-Bin and Oh, FedPara: Low-rank Hadamard Product for Communication-Efficient Federated
Learning, 2022. Wi has the factors xi and yi, and ti in a convolution (`Hadamard`). FedAvg averages
the factors of W1 and everything that is not factorised: the head, biases, BatchNorm.

Deviations: the head is not factorised, like the dense layers of the paper's VGG16; it factorises
networks of two dense layers whole, so a part of their head is personal. γ is 0 by default, in the
paper's runs of pFedPara 0.5. Factors start from a normal distribution with the variance that gives
W the variance of its fan-in. The mean is weighted by examples, as in FedAvg.
"""

from typing import Any

import jax

from fedjax_pfl.algorithms.shared.initial_state import model_shapes
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import partly_shared
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, Federation, State
from fedjax_pfl.core.errors import UsageError, require
from fedjax_pfl.networks.factorized import Hadamard
from fedjax_pfl.networks.pretrained import require_random_start

PERSONAL = ("x2", "y2", "t2")


def pfedpara(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    gamma: float = 0.0,
) -> Algorithm:
    """Creates pFedPara: kernels are W = W1 ⊙ (W2 + 1), low-rank, with a personal W2.

    Clients store the factors of W2; the server averages and stores all other variables.

    Args:
      gamma: γ, which chooses the rank of the factors: 0 is ⌈√max(I, O)⌉, with which W can have full
        rank; with 1 the factors have about as many parameters as W, or the rank of 0 if larger.
    """
    require_random_start("pfedpara", model)
    require((gamma >= 0) & (gamma <= 1), f"pfedpara.gamma is {gamma}; choose 0 to 1")
    net = Hadamard(model, federation.input_shape, gamma, input_dtype=federation.input_dtype)

    def is_personal(layer: str, leaf: str) -> bool:
        return layer in net.factorized and leaf in PERSONAL

    base = partly_shared(net, training, federation, is_personal)

    def init(key: jax.Array, start: State | None = None) -> State:
        network_shapes = model_shapes(model, federation)
        if start is not None and trees.same_shapes(network_shapes, start.server):
            raise UsageError(
                "a phase of pfedpara can only start from pfedpara with the same network and gamma: "
                "kernels cannot be written as its factors"
            )
        return base.init(key, start)

    return base._replace(init=init)


PFEDPARA = Method(pfedpara, title="pFedPara", paper="Hyeon-Woo et al. 2022")
