"""Networks with two convolutions, for EMNIST and for benchmarks of simulators."""

import flax.linen as nn
import jax

from fedjax_pfl.networks import init
from fedjax_pfl.networks.lenet import LeNet
from fedjax_pfl.networks.lowerings.conv import lowering, max_pool


class CNN(LeNet):
    """LeNet with 32 and 64 kernels and one hidden layer; 2,278,334 parameters on 28x28x1 images.

    Arguments as for `LeNet`, with other defaults.

    References: Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions"
    (2021), whose test bed FedMN uses.
    """

    outputs: int = 62
    kernels: tuple[int, ...] = (32, 64)
    dense: tuple[int, ...] = (2048,)


class DropoutCNN(nn.Module):
    """Two 3x3 convolutions, one pooling, a hidden layer, dropout; 1,626,442 parameters on 32x32x3.

    Layers are conv1, conv2, fc1 and fc2. Weights are initialised from Glorot's uniform
    distribution, biases as in PyTorch.

    References: the CIFAR-10 network of Granqvist et al., "pfl-research: simulation framework for
    accelerating research in Private Federated Learning" (2024). Deviations: the second ReLU comes
    after pooling, which gives the same result.

    Args:
      kernels: Number of kernels of each convolution.
      hidden: Number of outputs of fc1.
      dropout: Dropout rates before and after fc1.
    """

    outputs: int = 10
    kernels: tuple[int, ...] = (32, 64)
    hidden: int = 128
    dropout: tuple[float, ...] = (0.25, 0.5)
    conv: str = "auto"  # lowering of convolutions, see `lowerings.conv`
    layers = ("conv1", "conv2", "fc1", "fc2")  # names, from the input to the output
    head = "fc2"  # name of the last layer

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: init.Mask = None) -> jax.Array:
        """Maps [B, H, W, C] to [B, outputs]; `mask` is ignored."""
        del mask
        glorot = nn.initializers.xavier_uniform()
        first, second = self.kernels
        rate1, rate2 = self.dropout

        def conv(x: jax.Array, outputs: int, name: str) -> jax.Array:
            """Applies a 3x3 convolution with `outputs` kernels to x [B, H, W, C]."""
            bias_init = init.uniform(9 * x.shape[-1])
            layer = nn.Conv(
                outputs,
                (3, 3),
                padding="VALID",
                kernel_init=glorot,
                bias_init=bias_init,
                conv_general_dilated=lowering(self.conv),
                name=name,
            )
            return layer(x)

        def dense(x: jax.Array, outputs: int, name: str) -> jax.Array:
            bias_init = init.uniform(x.shape[-1])
            return nn.Dense(outputs, kernel_init=glorot, bias_init=bias_init, name=name)(x)

        x = conv(nn.relu(conv(x, first, "conv1")), second, "conv2")
        x = nn.relu(max_pool(x, (2, 2)))
        x = nn.Dropout(rate1, deterministic=not train)(x)
        x = nn.relu(dense(x.reshape(x.shape[0], -1), self.hidden, "fc1"))
        x = nn.Dropout(rate2, deterministic=not train)(x)
        return dense(x, self.outputs, self.head)
