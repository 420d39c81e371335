"""Runs FedAvg and pFedLA of FL-bench (KarhouTam/FL-bench) on the benchmark's work.

A round of its server runs unchanged from the user's checkout; evaluation is off by its own
settings. The adapter replaces CIFAR-10 by random images of the same size, and Hydra's facts about
the run. Needs torch, torchvision, hydra-core, omegaconf, ray, pandas, pynvml, rich, scikit-learn
and matplotlib.
"""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import fl_bench

_SERVERS = {"fedavg": "FedAvgServer", "pfedla": "pFedLAServer"}


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns facts about the library, and a function that runs one round."""
    child.checkout(spec, *fl_bench.NEEDS)
    method = spec["algorithm"]
    if method not in _SERVERS:
        raise child.Lacks(f"its adapter runs {' and '.join(_SERVERS)}, not {method}")
    import numpy as np
    import torch
    import torchvision
    from networks import NETWORKS
    from src.utils.models import MODELS, DecoupledModel

    clients, examples = spec["clients"], spec["examples"]
    pool = min(spec.get("pool", clients * examples), clients * examples)  # that clients share
    first_rows = range(0, clients * examples, examples)
    rows = [(np.arange(first, first + examples) % pool).tolist() for first in first_rows]
    fl_bench.write_partition(Path("data/cifar10"), rows, [[]] * clients)

    def images(root: Any, train: bool, download: bool) -> Any:
        rng, n = np.random.default_rng(0), pool if train else 2
        data = rng.integers(256, size=(n, 32, 32, 3), dtype=np.uint8)
        return types.SimpleNamespace(data=data, targets=rng.integers(10, size=n))

    class Network(DecoupledModel):
        """The benchmark's network, divided into body and head."""

        def __init__(self, dataset: str, pretrained: bool) -> None:
            super().__init__()
            network = NETWORKS[spec["network"]]()
            self.base, self.classifier = network[:-1], network[-1]

    torchvision.datasets.CIFAR10 = images
    MODELS["benchmark"] = Network
    options = {
        # Half a client more, because it takes the floor of the product.
        "join_ratio": min(1.0, (spec["cohort"] + 0.5) / clients),
        "global_epoch": 1,
        "local_epoch": spec["epochs"],
        "batch_size": spec["batch"],
    }
    server = fl_bench.make_server(
        spec["checkout"],
        (method, _SERVERS[method]),
        ("cifar10", "benchmark"),
        spec["rate"],
        options,
    )

    def run_round() -> None:
        server.selected_clients = list(server.client_sample_stream[0])
        server.train_one_round()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with child.counting() as counts:
        run_round()
    names = ("torch", "torchvision", "ray", "hydra-core")
    return {**child.check_work(spec, *counts), "versions": child.versions(*names)}, run_round


if __name__ == "__main__":
    child.serve(prepare)
