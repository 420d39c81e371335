"""Networks. All are called `(x, train=False, mask=None)`; `head` names a network's last layer."""

from fedjax_pfl.models.cnn import CNN
from fedjax_pfl.models.lenet import LeNet
from fedjax_pfl.models.mlp import MLP
from fedjax_pfl.models.parts import norm_layers
from fedjax_pfl.models.small import SmallCNN

# By the names that a configuration uses; their fields are its settings.
MODELS = {"cnn": CNN, "lenet": LeNet, "mlp": MLP, "small": SmallCNN}

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "LeNet",
    "SmallCNN",
    "norm_layers",
]
