"""Networks, called as `(x, train=False, mask=None)`.

`layers` has the names of a network's layers as in `trees.layer_name`, in the order of their calls,
which a tree of parameters, sorted by name, does not show. `head` is the last layer.
"""

from fedjax_pfl.networks.cnn import CNN, DropoutCNN
from fedjax_pfl.networks.cnn1d import CNN1D
from fedjax_pfl.networks.fasttext import FastText
from fedjax_pfl.networks.lenet import LeNet
from fedjax_pfl.networks.lstm import LSTM
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.networks.mobilenet import MobileNet
from fedjax_pfl.networks.normalisation import norm_layers
from fedjax_pfl.networks.pretrained import Pretrained
from fedjax_pfl.networks.resnet9 import ResNet9
from fedjax_pfl.networks.small import SmallCNN
from fedjax_pfl.networks.transformer import Transformer
from fedjax_pfl.networks.user_networks import from_flax

MODELS = {  # by the name that a configuration uses; fields are settings
    "cnn": CNN,
    "cnn1d": CNN1D,
    "dropout_cnn": DropoutCNN,
    "fasttext": FastText,
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
    "FastText",
    "LeNet",
    "MobileNet",
    "Pretrained",
    "ResNet9",
    "SmallCNN",
    "Transformer",
    "from_flax",
    "norm_layers",
]
