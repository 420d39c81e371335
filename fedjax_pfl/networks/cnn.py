"""Two-layer convolutional networks: of the EMNIST experiments, and of simulators' benchmarks."""

import flax.linen as nn
import jax

from fedjax_pfl.networks import init
from fedjax_pfl.networks.lenet import LeNet
from fedjax_pfl.networks.lowerings.conv import lowering, max_pool


class CNN(LeNet):
    """LeNet's shape with 32 and 64 kernels and one hidden layer; 2,278,334 parameters on 28x28x1.

    References: Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions"
    (2021), whose testbed FedMN uses.
    """

    outputs: int = 62
    kernels: tuple[int, ...] = (32, 64)
    dense: tuple[int, ...] = (2048,)


class DropoutCNN(nn.Module):
    """Two 3x3 convolutions, one pooling, a hidden layer, dropout; 1,626,442 parameters on 32x32x3.

    Layers are conv1, conv2, fc1 and fc2; dropout is before and after fc1. Weights start as Glorot's
    uniform, biases as PyTorch's.

    References: the CIFAR10 network of Granqvist et al., "pfl-research: simulation framework for
    accelerating research in Private Federated Learning" (2024). Deviations: the second ReLU comes
    after pooling, which commutes with it.

    Args:
      kernels: how many each convolution has.
      hidden: outputs of fc1.
      dropout: shares that are dropped in training, before and after fc1.
    """

    outputs: int = 10
    kernels: tuple[int, ...] = (32, 64)
    hidden: int = 128
    dropout: tuple[float, ...] = (0.25, 0.5)
    conv: str = "auto"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, from the input to the output."""
        return ("conv1", "conv2", "fc1", "fc2")

    @property
    def head(self) -> str:
        """Name of the last layer, the one that knows the classes."""
        return "fc2"

    @nn.compact
    def __call__(
        self, x: jax.Array, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """[B, H, W, C] -> [B, outputs]; `mask` changes nothing here."""
        del mask
        glorot = nn.initializers.xavier_uniform()
        first, second = self.kernels
        before, after = self.dropout

        def conv(x: jax.Array, outputs: int, name: str) -> jax.Array:
            start = init.uniform(9 * x.shape[-1])
            layer = nn.Conv(
                outputs,
                (3, 3),
                padding="VALID",
                kernel_init=glorot,
                bias_init=start,
                conv_general_dilated=lowering(self.conv),
                name=name,
            )
            return layer(x)

        def dense(x: jax.Array, outputs: int, name: str) -> jax.Array:
            start = init.uniform(x.shape[-1])
            return nn.Dense(outputs, kernel_init=glorot, bias_init=start, name=name)(x)

        x = conv(nn.relu(conv(x, first, "conv1")), second, "conv2")
        x = nn.relu(max_pool(x, (2, 2)))
        x = nn.Dropout(before, deterministic=not train)(x)
        x = nn.relu(dense(x.reshape(x.shape[0], -1), self.hidden, "fc1"))
        x = nn.Dropout(after, deterministic=not train)(x)
        return dense(x, self.outputs, self.head)
