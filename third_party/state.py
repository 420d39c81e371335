"""The small network that implementations are compared on, and the parameters of theirs by name.

Needs torch. Names are fc1.weight, fc1.bias, bn1.weight, ..., fc2.bias, with PyTorch's shapes.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

HEAD = "fc2"


def network(start: Mapping[str, Any]) -> tuple[nn.Sequential, nn.Linear]:
    """A body and a head with these parameters; with BatchNorm where there are some of it."""
    hidden, features = start["fc1.weight"].shape
    layers = [("fc1", nn.Linear(features, hidden))]
    if "bn1.weight" in start:
        layers.append(("bn1", nn.BatchNorm1d(hidden)))
    base = nn.Sequential(OrderedDict([*layers, ("relu", nn.ReLU())]))
    head = nn.Linear(hidden, len(start["fc2.weight"]))
    with torch.no_grad():
        for module in (base, head):
            for name, parameter in module.named_parameters():
                whole = name if "." in name else f"{HEAD}.{name}"
                parameter.copy_(torch.from_numpy(np.asarray(start[whole])))
    return base, head


def named(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """By our names: without those of the parts that they lie in; a head alone has none."""
    found = {}
    for name, value in parameters.items():
        layer, _, leaf = name.rpartition(".")
        layer = layer.rpartition(".")[2] or HEAD
        layer = HEAD if layer in ("head", "classifier") else layer
        if leaf in ("weight", "bias"):
            found[f"{layer}.{leaf}"] = value.detach().cpu().numpy().copy()
    return found


def of(*modules: nn.Module) -> dict[str, np.ndarray]:
    """Of modules together."""
    return {n: v for module in modules for n, v in named(dict(module.named_parameters())).items()}


def in_order(start: Mapping[str, Any], values: Any) -> dict[str, np.ndarray]:
    """A list as their code keeps it, in the order of the network's parameters."""
    base, head = network(start)
    names = [*of(base), *of(head)]
    return {n: v.detach().cpu().numpy().copy() for n, v in zip(names, values, strict=True)}


class Scores:
    """Each client's share of test examples that it gets right."""

    def __init__(self, path: str, clients: int) -> None:
        """path: of the .npz file."""
        self._path = path
        self.before, self.after = np.full(clients, np.nan), np.full(clients, np.nan)

    def write(self) -> None:
        """Both of them."""
        np.savez(self._path, before=self.before, after=self.after)


class Record:
    """What is written down round by round."""

    def __init__(self, path: str) -> None:
        """path: of the .npz file."""
        self._path, self._arrays = path, dict[str, np.ndarray]()
        self.rounds = 0

    def add(self, shared: Mapping[str, Any], clients: Mapping[int, Mapping[str, Any]]) -> None:
        """The state after one more round; the first call is of the start."""
        t = self.rounds
        self._arrays |= {f"{t}/server/{n}": v for n, v in shared.items()}
        for i, each in clients.items():
            self._arrays |= {f"{t}/{i}/{n}": v for n, v in each.items()}
        self.rounds += 1

    def write(self) -> None:
        """All of it."""
        np.savez(self._path, **self._arrays)  # type: ignore[arg-type]
