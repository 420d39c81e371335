"""Networks as plain data for model files, by name and settings."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from fedjax_pfl.algorithms.fedcp import TwoHeads
from fedjax_pfl.algorithms.feddbe import Shifted
from fedjax_pfl.algorithms.fedem import Mixture
from fedjax_pfl.algorithms.fedmn.modular import Modular, Routed
from fedjax_pfl.algorithms.fedproto import Nearest
from fedjax_pfl.algorithms.gpfl import Valved
from fedjax_pfl.algorithms.knn_per import NeighbourMixture
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import MODELS
from fedjax_pfl.networks.factorized import Factorized, Hadamard, SplitKernels
from fedjax_pfl.networks.pretrained import Pretrained
from fedjax_pfl.networks.user_defined import UserNetwork
from fedjax_pfl.networks.zero_head import ZeroHead
from fedjax_pfl.settings import custom

NETWORKS: dict[str, Callable[..., Any]] = {
    **MODELS,
    "factorized": Factorized,
    "hadamard": Hadamard,
    "mixture": Mixture,
    "modular": Modular,
    "nearest": Nearest,
    "neighbour_mixture": NeighbourMixture,
    "routed": Routed,
    "shifted": Shifted,
    "split_kernels": SplitKernels,
    "two_heads": TwoHeads,
    "valved": Valved,
}


def to_json(net: Any) -> dict[str, Any]:
    """Returns the kind of a network, with its settings by name, as plain data.

    How convolutions are computed is left out: it depends on the machine.

    Raises UsageError if it is neither built-in nor passed to `run` as `model`.
    """
    while isinstance(net, Pretrained | ZeroHead):
        net = net.model  # the wrapper only initialises it
    if isinstance(net, UserNetwork):
        settings = json.loads(json.dumps(dict(net.settings)))
        return {"kind": "own", "name": net.name, "settings": settings}
    kinds = {network: name for name, network in NETWORKS.items()}
    if type(net) not in kinds:
        raise UsageError(f"{type(net).__name__} is a network of your own, which no file can hold")
    fields = {f.name: getattr(net, f.name) for f in dataclasses.fields(net)}
    settings = {name: v for name, v in fields.items() if name not in ("parent", "name", "conv")}
    inner = {k: to_json(v) if dataclasses.is_dataclass(v) else v for k, v in settings.items()}
    return {"kind": kinds[type(net)], **json.loads(json.dumps(inner))}


def from_json(content: dict[str, Any], facts: dict[str, Any], model: Any) -> Any:
    """Returns the network, without parameters, that `content` of `to_json` describes.

    `facts` is the result of `export.describe`; `model` is the network if it is user-defined. Raises
    UsageError if a user-defined network is required and `model` is missing or another one.
    """
    if content["kind"] != "own":
        fields = {
            key: from_json(value, facts, model) if isinstance(value, dict) else value
            for key, value in content.items()
            if key != "kind"
        }
        return NETWORKS[content["kind"]](**fields)
    name = content["name"]
    settings = content["settings"]
    if model is None:
        raise UsageError(f"it has a network of your own, {name}; use load(path, model={name})")
    registry, config = custom.register({}, model=model)
    if config["model"] != name:
        raise UsageError(f"it has the network {name}, got {config['model']}")
    net = registry.model[name](outputs=facts["outputs"], **settings)
    shape, dtype = tuple(facts["input_shape"]), facts["input_dtype"]
    return dataclasses.replace(net, input_shape=shape, input_dtype=dtype)


def lists_to_tuples(content: Any) -> Any:
    """Replaces lists in JSON content by tuples, the type that settings have."""
    if isinstance(content, dict):
        return {key: lists_to_tuples(value) for key, value in content.items()}
    return tuple(map(lists_to_tuples, content)) if isinstance(content, list) else content
