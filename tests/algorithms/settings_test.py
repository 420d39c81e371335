"""Settings, federations and networks that a method refuses with a UsageError."""

from typing import Any

import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core.algorithm import Algorithm
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.task import regression
from fedjax_pfl.networks import MLP
from fedjax_pfl.networks.pretrained import Pretrained
from fedjax_pfl.networks.zero_head import ZeroHead
from tests import cases, tiny
from tests.algorithms.linear import Deep

FEDERATION = tiny.federated()[1]  # six clients, three classes
NETWORK = tiny.Net()

# (method, settings, part of the message after the name of the setting)
SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("apfl", {"alpha": -0.1}, "0 to 1"),
    ("apfl", {"alpha": 1.1}, "0 to 1"),
    ("apfl", {"alpha_rate": -1.0}, "at least 0"),
    ("clustered_fl", {"max_clusters": 0}, "at least 1"),
    ("ditto", {"penalty": -1.0}, "at least 0"),
    ("ditto", {"own_epochs": 0}, "at least 1"),
    ("factorized_fl", {"share": "v"}, "all or u"),
    ("factorized_fl", {"matching": "best"}, "similar, random, worst or none"),
    ("factorized_fl", {"layout": "io"}, "kernel, mixed or oihw"),
    ("factorized_fl", {"minimum": 0}, "choose 1 to 6"),
    ("factorized_fl", {"minimum": 7}, "choose 1 to 6"),
    ("factorized_fl", {"peers": 6, "matching": "random"}, "choose 1 to 5"),
    ("factorized_fl", {"sparsity": -1.0}, "at least 0"),
    ("factorized_fl", {"rank": 0}, "at least 1"),
    ("factorized_fl", {"pruned": "never"}, "travel or evaluation"),
    ("factorized_fl_moved", {"share": "v"}, "all or u"),
    ("factorized_fl_moved", {"minimum": 7}, "choose 1 to 6"),
    ("factorized_fl_moved", {"sparsity": -1.0}, "at least 0"),
    ("fedala", {"layers": 3}, "choose 1 to 2"),
    ("fedala", {"weight_rate": -1.0}, "at least 0"),
    ("fedala", {"share": 0.0}, "above 0"),
    ("fedala", {"first_passes": 0}, "at least 1"),
    ("fedamp", {"attention": "dice"}, "cosine or distance"),
    ("fedamp", {"sigma": 0.0}, "above 0"),
    ("fedamp", {"alpha": 0.0}, "above 0"),
    ("fedamp", {"penalty": -1.0}, "at least 0"),
    ("fedamp", {"self_weight": 2.0}, "0 to 1"),
    ("fedas", {"align_rate": -1.0}, "at least 0"),
    ("fedas", {"align_epochs": 0}, "at least 1"),
    ("fedavg_plus", {"rate": 0.0}, "above 0"),
    ("fedavg_plus", {"epochs": 0}, "at least 1"),
    ("fedbabu", {"epochs": 0}, "at least 1"),
    ("fedbabu", {"rate": 0.0}, "above 0"),
    ("fedbabu", {"tune": "none"}, "all, head or body"),
    ("fedcac", {"critical_share": 1.5}, "0 to 1"),
    ("fedcac", {"alone_after": 0}, "above 0"),
    ("fedcp", {"penalty": -1.0}, "at least 0"),
    ("feddbe", {"penalty": -1.0}, "at least 0"),
    ("feddbe", {"mean_momentum": 0.0}, "at most 1"),
    ("feddyn", {"alpha": 0.0}, "above 0"),
    ("fedem", {"components": 0}, "at least 1"),
    ("fedfomo", {"peers": 6}, "choose 1 to 5"),
    ("fedfomo", {"peers": 0}, "choose 1 to 5"),
    ("fedfomo", {"reference": "first"}, "start or last"),
    ("fedfomo", {"epsilon": 1.5}, "0 to 1"),
    ("fedfomo", {"epsilon_decay": -0.1}, "at least 0"),
    ("fedlc", {"tau": -1.0}, "at least 0"),
    ("floco", {"endpoints": 0}, "at least 1"),
    ("floco", {"place_after": 0}, "at least 1"),
    ("floco", {"radius": -1.0}, "at least 0"),
    ("flute", {"collapse": -1.0}, "at least 0"),
    ("flute", {"head_epochs": -1}, "at least 0"),
    ("gpfl", {"penalty": -1.0}, "at least 0"),
    ("gpfl", {"decay": -1.0}, "at least 0"),
    ("ifca", {"clusters": 0}, "at least 1"),
    ("ifca", {"cluster_layers": 3}, "choose 1 to 2"),
    ("fedmn", {"layout": (3,)}, "two layers or more"),
    ("fedmn", {"layout": (2, 0, 2)}, "each with a block"),
    ("fedmn", {"gates": "open"}, "soft or hard"),
    ("fedmn", {"temperatures": (1.0, 0.0)}, "above 0"),
    ("fedmn", {"dropout": 1.0}, "below 1"),
    ("fedmn", {"x_size": 0}, "at least 1"),
    ("fedpac", {"penalty": -1.0}, "at least 0"),
    ("fedpac", {"head_epochs": 0}, "at least 1"),
    ("fedprox", {"mu": -1.0}, "at least 0"),
    ("fedproto", {"penalty": -1.0}, "at least 0"),
    ("fedproto", {"decides": "dice"}, "prototype or head"),
    ("fedgh", {"rate": -0.1}, "at least 0"),
    ("fedtgp", {"penalty": -1.0}, "at least 0"),
    ("fedtgp", {"epochs": 0}, "at least 1"),
    ("fedtgp", {"threshold": -1.0}, "at least 0"),
    ("fedtgp", {"decides": "dice"}, "prototype or head"),
    ("fml", {"alpha": 1.5}, "0 to 1"),
    ("fml", {"beta": -0.5}, "0 to 1"),
    ("fedrep", {"head_epochs": 0}, "at least 1"),
    ("fedrep", {"head_steps": 0}, "at least 1"),
    ("knn_per", {"neighbours": 0}, "at least 1"),
    ("knn_per", {"weight": 1.5}, "0 to 1"),
    ("knn_per", {"scale": 0.0}, "above 0"),
    ("l2gd", {"pull": -0.1}, "0 to 1"),
    ("l2gd", {"pull": 1.5}, "0 to 1"),
    ("lg_fedavg", {"shared_layers": 0}, "choose 1 to 1"),
    ("lg_fedavg", {"shared_layers": 2}, "choose 1 to 1"),
    ("moon", {"mu": -1.0}, "at least 0"),
    ("moon", {"temperature": 0.0}, "above 0"),
    ("pefll", {"rate": 0.0}, "above 0"),
    ("pefll", {"clip_norm": 0.0}, "above 0"),
    ("pefll", {"weight_decay": -1.0}, "at least 0"),
    ("pefll", {"descriptor": 0}, "at least 1"),
    ("pefll", {"embedding_width": 0}, "at least 1"),
    ("pefll", {"depth": -1}, "choose 0 to"),
    ("per_fedavg", {"variant": "second"}, "fo or hf"),
    ("per_fedavg", {"alpha": -0.1}, "at least 0"),
    ("per_fedavg", {"delta": 0.0}, "above 0"),
    ("pfedfda", {"ridge": 0.0}, "above 0"),
    ("pfedgraph", {"alpha": 0.0}, "above 0"),
    ("pfedgraph", {"penalty": -1.0}, "at least 0"),
    ("pfedhn", {"rate": 0.0}, "above 0"),
    ("pfedhn", {"momentum": 1.0}, "below 1"),
    ("pfedhn", {"clip_norm": 0.0}, "above 0"),
    ("pfedhn", {"weight_decay": -0.1}, "at least 0"),
    ("pfedhn", {"embedding": 0}, "at least 1"),
    ("pfedhn", {"width": -1}, "at least 0"),
    ("pfedhn", {"fixed": True, "frozen": True}, "nothing to learn"),
    ("pfedhn", {"fixed": True, "embedding": 4}, "one number per class"),
    ("pfedhn_pc", {"rate": -1.0}, "above 0"),
    ("pfedla", {"k": 4}, "3 layers"),
    ("pfedla", {"k": -1}, "choose 0"),
    ("pfedla", {"granularity": "leaf"}, "layer or model"),
    ("pfedla", {"normalise": "max"}, "relu or softmax"),
    ("pfedla", {"rate": -0.1}, "at least 0"),
    ("pfedla", {"candidates": 1}, "choose 2 to 6"),
    ("pfedla", {"candidates": 7}, "choose 2 to 6"),
    ("pfedme", {"penalty": 0.0}, "above 0"),
    ("pfedme", {"inner_steps": 0}, "at least 1"),
    ("pfedme", {"inner_rate": 0.0}, "above 0"),
    ("pfedme", {"penalty": 10.0, "inner_rate": 0.2}, "diverge"),
    ("pfedme", {"beta": 0.0}, "above 0"),
    ("pfedpara", {"gamma": 2.0}, "choose 0 to 1"),
    ("scaffold", {"server_rate": 0.0}, "above 0"),
]


def make(
    name: str, network: Any = NETWORK, federation: Any = FEDERATION, **settings: Any
) -> Algorithm:
    return getattr(algorithms, name)(network, cases.training(), federation, **settings)


@pytest.mark.parametrize(("name", "settings", "message"), SETTINGS)
def test_invalid_settings(name: str, settings: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=rf"^{name}\.{next(iter(settings))} .*{message}"):
        make(name, **settings)


class WithoutHead(tiny.Net):
    """A network whose `head` is none of its layers."""

    head = "nothing"


class FirstIsHead(tiny.Net):
    """A network whose `head` does not have the outputs."""

    head = "fc1"


CLASSIFIERS = ("fedas", "fedem", "fedgh", "fedlc", "fedpac", "fedproto", "fedrod", "fedtgp")
CLASSIFIERS += ("flute", "fml", "gpfl", "knn_per", "pfedfda")


@pytest.mark.parametrize(
    ("name", "changes", "settings", "message"),
    [
        ("fedamp", {"active": np.arange(6) < 1}, {}, "at least 2 active clients"),
        ("fedfomo", {"active": np.arange(6) < 1}, {"peers": 1}, "at least one other"),
        ("fedfomo", {"validation_counts": np.zeros(6, int)}, {}, "validation_fraction"),
        ("knn_per", {"validation_counts": np.zeros(6, int)}, {"select_weight": True}, "none; use"),
        ("pfedhn", {"class_counts": None}, {"fixed": True}, "shares of classes"),
        ("pfedla", {"counts": FEDERATION.counts[:1], "active": np.ones(1, bool)}, {}, "at least 2"),
        ("pfedla", {"groups": np.arange(6) % 2}, {}, "without groups"),
        *((n, {"task": regression()}, {}, "choose a dataset with classes") for n in CLASSIFIERS),
    ],
)
def test_invalid_federations(name: str, changes: Any, settings: Any, message: str):
    with pytest.raises(UsageError, match=f"^{name}.*{message}"):
        make(name, federation=FEDERATION._replace(**changes), **settings)


PRETRAINED = Pretrained(NETWORK, {})
OWN_PARAMETERS = (
    "factorized_fl",
    "fedem",
    "fedmn",
    "fedmn_correlation",
    "ifca",
    "pefll",
    "pfedhn",
    "pfedpara",
)


# Methods that do not start from the last layer of the network, or never train it.
OWN_HEADS = ("factorized_fl", "fedbabu", "fedmn", "fedmn_correlation", "pefll", "pfedhn")


@pytest.mark.parametrize(
    ("name", "network", "message"),
    [
        ("fedbn", MLP(3), "^fedbn needs a network with BatchNorm"),
        ("fedper", MLP(3, hidden=()), "this one has only fc1"),
        ("floco", WithoutHead(), "^floco mixes heads, and this network has no layer"),
        ("fedproto", WithoutHead(), "^fedproto compares the inputs of the head"),
        (
            "fedproto",
            (MLP(3, hidden=(4,)), MLP(3, hidden=(6,))),
            "^fedproto .* of lengths 4, 6; give",
        ),
        ("fedgh", FirstIsHead(), "^fedgh needs a linear head, and fc1 .* Dense"),
        ("pfedfda", Deep(3, 2), "^pfedfda needs a head with a bias, and head has none"),
        *((n, MLP(3, hidden=()), f"^{n} .* only fc1; use") for n in ("fedas", "fedpac", "pfedfda")),
        ("pfedhn_pc", MLP(3, hidden=()), "^pfedhn_pc .* has no other"),
        *((n, ZeroHead(NETWORK), f"^{n} needs a random last layer.* set zero_") for n in OWN_HEADS),
        *(
            (n, ZeroHead(MLP(3, hidden=())), f"^{n} starts copies of fc1 with")
            for n in ("fedem", "ifca")
        ),
        *((n, PRETRAINED, f"^{n} needs random initial parameters") for n in OWN_PARAMETERS),
        ("fedem", ZeroHead(PRETRAINED), "^fedem needs random initial parameters"),
    ],
)
def test_invalid_networks(name: str, network: Any, message: str):
    groups = len(network) if isinstance(network, tuple) else 1
    federation = FEDERATION._replace(groups=np.arange(FEDERATION.clients) % groups)
    with pytest.raises(UsageError, match=message):
        make(name, network, federation)


def test_clusters_with_equal_last_layers_are_refused():
    for layers in (2, None):
        make("ifca", ZeroHead(NETWORK), cluster_layers=layers)
    with pytest.raises(
        UsageError, match=r"^ifca starts copies of fc2 with random values, and zero_head"
    ):
        make("ifca", ZeroHead(NETWORK), cluster_layers=1)
