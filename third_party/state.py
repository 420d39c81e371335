"""The small network that libraries are compared on, and results in files.

Needs torch. Parameters are named fc1.weight, fc1.bias, bn1.weight, ..., fc2.bias and have PyTorch's
shapes. The work is an .npz file, see `experiments.libraries.reference_work.work`.
"""

from collections import OrderedDict
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

HEAD = "fc2"


def read_work(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays of a work file by name, and the initial parameters by name."""
    with np.load(path, allow_pickle=False) as stored:
        work = dict(stored)
    prefix = "start/"
    start = {name.removeprefix(prefix): v for name, v in work.items() if name.startswith(prefix)}
    return work, start


def network(start: Mapping[str, Any]) -> tuple[nn.Sequential, nn.Linear]:
    """Returns body and head with the given parameters; with BatchNorm if they contain some."""
    hidden, features = start["fc1.weight"].shape
    layers = [("fc1", nn.Linear(features, hidden))]
    if "bn1.weight" in start:
        layers.append(("bn1", nn.BatchNorm1d(hidden)))
    base = nn.Sequential(OrderedDict([*layers, ("relu", nn.ReLU())]))
    head = nn.Linear(hidden, len(start["fc2.weight"]))
    with torch.no_grad():
        for module in (base, head):
            for name, parameter in module.named_parameters():
                full_name = name if "." in name else f"{HEAD}.{name}"
                parameter.copy_(torch.from_numpy(np.asarray(start[full_name])))
    return base, head


def rename(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns weights and biases by the names of this module.

    Args:
      parameters: Tensors by their names in a library. A name without a layer is one of the head.
    """
    arrays = {}
    for name, value in parameters.items():
        layer, _, leaf = name.rpartition(".")
        layer = layer.rpartition(".")[2] or HEAD
        layer = HEAD if layer in ("head", "classifier") else layer
        if leaf in ("weight", "bias"):
            arrays[f"{layer}.{leaf}"] = value.detach().cpu().numpy().copy()
    return arrays


def parameters_of(*modules: nn.Module) -> dict[str, np.ndarray]:
    """Returns the parameters of several modules by name."""
    dicts = (dict(module.named_parameters()) for module in modules)
    return {name: value for parameters in dicts for name, value in rename(parameters).items()}


def control_variates(start: Mapping[str, Any], values: Any) -> dict[str, np.ndarray]:
    """Returns SCAFFOLD's control variates as control.NAME.

    Args:
      start: Initial parameters.
      values: Tensors in the order of the network's parameters.
    """
    names = parameters_of(*network(start))
    return {
        f"control.{name}": value.detach().cpu().numpy().copy()
        for name, value in zip(names, values, strict=True)
    }


# Layers of PFLlib's clients that are no part of the network, and their names here, by method.
_ADDED_LAYERS: dict[str, dict[str, str]] = {
    "gpfl": {
        "CoV.Conditional_gamma.0": "valve.gamma_linear",
        "CoV.Conditional_gamma.2": "valve.gamma_norm",
        "CoV.Conditional_beta.0": "valve.beta_linear",
        "CoV.Conditional_beta.2": "valve.beta_norm",
        "GCE.embedding": "categories",
    },
    # Its first half of outputs is for the personal head, ours for the global one.
    "fedcp": {"model.gate.cs.fc.0": "policy.linear", "model.gate.cs.fc.1": "policy.norm"},
}


def added_tensors(method: str, client: Any) -> dict[str, torch.Tensor]:
    """Returns parameters of a PFLlib client that are no part of the network, by name."""
    tensors = {}
    for path, layer in _ADDED_LAYERS.get(method, {}).items():
        for leaf, parameter in attrgetter(path)(client).named_parameters():
            tensors[layer if layer == "categories" else f"{layer}.{leaf}"] = parameter.detach()
    return tensors


def _reorder(name: str, array: np.ndarray) -> np.ndarray:
    """Returns parameters of FedCP's policy with the two halves exchanged, and others unchanged."""
    return np.roll(array, len(array) // 2, 0) if name.startswith("policy") else array


def added_parameters(method: str, client: Any) -> dict[str, np.ndarray]:
    """Returns copies of `added_tensors` as arrays."""
    tensors = added_tensors(method, client)
    return {name: _reorder(name, value.numpy().copy()) for name, value in tensors.items()}


def set_added_parameters(method: str, client: Any, work: Mapping[str, Any]) -> None:
    """Sets a PFLlib client's `added_tensors` to the initial values of the work."""
    for name, tensor in added_tensors(method, client).items():
        tensor.copy_(torch.from_numpy(_reorder(name, work[f"added/{name}"])))


def _set_linear(layer: nn.Linear, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Copies arrays into a fully connected layer."""
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        if bias is not None:
            layer.bias.copy_(torch.from_numpy(bias))


class Embedding(nn.Module):
    """PeFLL's embedding network of `fedjax_pfl`, an MLP, with the initial values of a work."""

    def __init__(self, work: Mapping[str, Any]) -> None:
        super().__init__()
        prefix, layers = "added/embedding.", {}
        for name, weight in work.items():
            layer = name.removeprefix(prefix).removesuffix(".weight")
            if name == f"{prefix}{layer}.weight":
                bias = work.get(f"{prefix}{layer}.bias")
                outputs, inputs = weight.shape
                layers[layer] = nn.Linear(inputs, outputs, bias=bias is not None)
                _set_linear(layers[layer], weight, bias)
        self.labels = layers.pop("labels")
        self.layers = nn.ModuleList(layers[name] for name in sorted(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns a vector for each example, [B, l]."""
        classes = self.labels.in_features
        one_hot = nn.functional.one_hot(y, classes).float() * classes**0.5
        z = self.layers[0](x) + self.labels(one_hot)
        for layer in self.layers[1:]:
            z = layer(torch.relu(z))
        return z


def set_hypernetwork(network: Any, work: Mapping[str, Any]) -> None:
    """Sets FL-bench's hypernetwork of PeFLL to the initial values of the work."""
    linear_layers = (layer for layer in network.mlp if isinstance(layer, nn.Linear))
    layers = {f"layer{k + 1}": layer for k, layer in enumerate(linear_layers)}
    for name, layer in network.params_generator.items():
        *_, module, leaf = name.split("-")
        layers[f"head_{HEAD if module == 'classifier' else module}_{leaf}"] = layer
    for name, layer in layers.items():
        weight, bias = (work[f"added/hypernetwork.{name}.{leaf}"] for leaf in ("weight", "bias"))
        _set_linear(layer, weight, bias)


def set_endpoints(parameters: Mapping[str, Any], start: Mapping[str, Any]) -> None:
    """Sets all endpoints of FL-bench's Floco to the head's initial parameters."""
    for name, value in parameters.items():
        if "._weights." in name:
            value.copy_(torch.from_numpy(start[f"{HEAD}.weight"]))
        elif name == "classifier.bias":
            value.copy_(torch.from_numpy(start[f"{HEAD}.bias"]))


def endpoints(parameters: Mapping[str, Any]) -> np.ndarray:
    """Returns the weights of all endpoints of FL-bench's Floco, [outputs, inputs, endpoints]."""
    weights = [value for name, value in parameters.items() if "._weights." in name]
    return torch.stack(weights, -1).detach().numpy().copy()


class Scores:
    """Each client's accuracy on test examples, before and after its training; saved as .npz."""

    def __init__(self, path: str, clients: int) -> None:
        self._path = path
        self.before, self.after = np.full(clients, np.nan), np.full(clients, np.nan)

    def write(self) -> None:
        """Writes the file."""
        np.savez(self._path, before=self.before, after=self.after)


class Record:
    """Parameters of server and clients after each round; saved as .npz."""

    def __init__(self, path: str) -> None:
        self._path, self._arrays = path, dict[str, np.ndarray]()
        self._round = 0

    def add(self, server: Mapping[str, Any], clients: Mapping[int, Mapping[str, Any]]) -> None:
        """Adds the parameters after a round; the first call adds the initial ones."""
        for owner, parameters in {"server": server, **clients}.items():
            self._arrays |= {f"{self._round}/{owner}/{n}": v for n, v in parameters.items()}
        self._round += 1

    def write(self) -> None:
        """Writes the file."""
        np.savez(self._path, **self._arrays)  # type: ignore[arg-type]
