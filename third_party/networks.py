"""The benchmark's networks in PyTorch, written here; each ends with its head.

Sizes and layers are those of `fedjax_pfl.networks` on images of 3x32x32 with ten classes.
"""

import torch
from torch import nn


def lenet() -> nn.Sequential:
    """Returns the network of `fedjax_pfl.networks.LeNet`."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def mlp() -> nn.Sequential:
    """Returns the network of `fedjax_pfl.networks.MLP`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))


def dropout_cnn() -> nn.Sequential:
    """Returns the network of `fedjax_pfl.networks.DropoutCNN`."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    for layer in network:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
    return network


class _Add(nn.Module):
    """Layers with a residual connection: x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def resnet9() -> nn.Sequential:
    """Returns the network of `fedjax_pfl.networks.ResNet9`."""

    def block(inputs: int, outputs: int, size: int = 3, **options: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, size, bias=False, **options),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    return nn.Sequential(
        block(3, 64, padding=1),
        block(64, 128, 5, stride=2, padding=2),
        _Add(block(128, 128, padding=1), block(128, 128, padding=1)),
        block(128, 256, padding=1),
        nn.MaxPool2d(2),
        _Add(block(256, 256, padding=1), block(256, 256, padding=1)),
        block(256, 256),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


NETWORKS = {"lenet": lenet, "mlp": mlp, "dropout_cnn": dropout_cnn, "resnet9": resnet9}
