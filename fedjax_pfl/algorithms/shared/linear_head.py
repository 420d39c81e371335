"""The last layer of a network as a linear map from features to outputs."""

from typing import Any

from fedjax_pfl.algorithms.shared.initial_state import model_shapes
from fedjax_pfl.core.algorithm import Federation, PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import features


def head_layer(network: Any, variables: PyTree) -> PyTree:
    """Returns the parameters of the network's last layer, `kernel` [d, C] and maybe `bias` [C]."""
    layer = variables["params"]
    for name in network.head.split("/"):
        layer = layer[name]
    return layer


def head_variables(network: Any, layer: PyTree) -> PyTree:
    """Returns the network's variables with its last layer alone; the inverse of `head_layer`."""
    for name in reversed(network.head.split("/")):
        layer = {name: layer}
    return {"params": layer}


def linear_head_width(method: str, network: Any, federation: Federation) -> int:
    """Returns the length d of the features. Raises UsageError unless the head is one Dense layer.

    Args:
      method: Name of the method that needs such a head, for the message.
      network: The network.
      federation: Gives the shape of examples and the number of outputs.
    """
    d = features.width(method, network, federation)
    layer = head_layer(network, model_shapes(network, federation))
    shapes = {name: getattr(leaf, "shape", None) for name, leaf in layer.items()}
    kernel = {"kernel": (d, federation.outputs)}
    if shapes not in (kernel, kernel | {"bias": (federation.outputs,)}):
        raise UsageError(
            f"{method} needs a linear head, and {network.head} of this network is not Dense with "
            f"{federation.outputs} outputs; use such a layer as head"
        )
    return d
