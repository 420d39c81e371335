"""A network for 8x8 digits that trains in seconds."""

from fedjax_pfl.networks.lenet import LeNet


class SmallCNN(LeNet):
    """LeNet with 3x3 kernels and SAME padding; 9,258 parameters on 8x8x1 images.

    Arguments as for `LeNet`, with other defaults.
    """

    dense: tuple[int, ...] = (32,)
    kernel_size: int = 3
    padding: str = "SAME"
