"""Networks. All are called `(x, train=False, mask=None)`.

`layers` names a network's layers as `trees.layer_name` does, in the order in which they are called
(a tree of parameters is sorted by name and cannot tell); `head` is the last of them.
"""

from fedjax_pfl.networks.cnn import CNN, DropoutCNN
from fedjax_pfl.networks.cnn1d import CNN1D
from fedjax_pfl.networks.lenet import LeNet
from fedjax_pfl.networks.lstm import LSTM
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.networks.mobilenet import MobileNet
from fedjax_pfl.networks.normalisation import norm_layers
from fedjax_pfl.networks.resnet9 import ResNet9
from fedjax_pfl.networks.small import SmallCNN
from fedjax_pfl.networks.transformer import Transformer

# By the names that a configuration uses; their fields are its settings.
MODELS = {
    "cnn": CNN,
    "cnn1d": CNN1D,
    "dropout_cnn": DropoutCNN,
    "lenet": LeNet,
    "lstm": LSTM,
    "mlp": MLP,
    "mobilenet": MobileNet,
    "resnet9": ResNet9,
    "small": SmallCNN,
    "transformer": Transformer,
}

__all__ = [
    "CNN",
    "CNN1D",
    "LSTM",
    "MLP",
    "MODELS",
    "DropoutCNN",
    "LeNet",
    "MobileNet",
    "ResNet9",
    "SmallCNN",
    "Transformer",
    "norm_layers",
]
