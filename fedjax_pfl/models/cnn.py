"""The two-layer convolutional network of the EMNIST experiments."""

from fedjax_pfl.models.lenet import LeNet


class CNN(LeNet):
    """LeNet's shape with 32 and 64 kernels and one hidden layer; 2,278,334 parameters on 28x28x1.

    References: Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions"
    (2021), whose testbed FedMN uses.
    """

    outputs: int = 62
    kernels: tuple[int, ...] = (32, 64)
    dense: tuple[int, ...] = (2048,)
