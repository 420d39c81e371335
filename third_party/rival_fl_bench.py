"""FL-bench's FedAvg and pFedLA (KarhouTam/FL-bench) on the benchmark's work, from a checkout.

Their server's round is run as it is, with evaluation switched off by their own settings. What is
replaced outside of it: the folder of CIFAR10 by random images of the same sizes, and what Hydra
would say of the run. Needs torch, torchvision, hydra-core, omegaconf, ray, pandas, pynvml, rich,
scikit-learn and matplotlib.
"""

import json
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child

_NEEDS = (
    "numpy",
    "torch",
    "torchvision",
    "hydra",
    "omegaconf",
    "ray",
    "pandas",
    "pynvml",
    "rich",
    "sklearn",
    "matplotlib",
)
_SERVERS = {"fedavg": "FedAvgServer", "pfedla": "pFedLAServer"}


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """A server of theirs; the network is ours."""
    child.checkout(spec, *_NEEDS)
    method = spec["algorithm"]
    if method not in _SERVERS:
        raise child.Lacks(f"its adapter runs {' and '.join(_SERVERS)}, not {method}")
    import importlib

    import numpy as np
    import torch
    import torchvision
    from networks import NETWORKS
    from omegaconf import DictConfig, OmegaConf
    from src.server import fedavg
    from src.utils.functional import parse_args
    from src.utils.models import MODELS, DecoupledModel

    clients, examples = spec["clients"], spec["examples"]
    pool = min(spec.get("pool", clients * examples), clients * examples)  # that clients share
    own = {i: (np.arange(i * examples, (i + 1) * examples) % pool).tolist() for i in range(clients)}
    everyone = list(range(clients))
    folder = Path("data/cifar10")
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"split": "sample"}))
    split = {
        "separation": {"train": everyone, "val": [], "test": everyone, "total": clients},
        "data_indices": [{"train": own[i], "val": [], "test": []} for i in everyone],
    }
    (folder / "partition.pkl").write_bytes(pickle.dumps(split))

    def images(root: Any, train: bool, download: bool) -> Any:
        rng, n = np.random.default_rng(0), pool if train else 2
        data = rng.integers(256, size=(n, 32, 32, 3), dtype=np.uint8)
        return types.SimpleNamespace(data=data, targets=rng.integers(10, size=n))

    class Network(DecoupledModel):
        """The benchmark's, cut where they want it to be."""

        def __init__(self, dataset: str, pretrained: bool) -> None:
            super().__init__()
            network = NETWORKS[spec["network"]]()
            self.base, self.classifier = network[:-1], network[-1]

    torchvision.datasets.CIFAR10 = images
    MODELS["benchmark"] = Network
    fedavg.FLBENCH_ROOT = Path.cwd()
    runtime = types.SimpleNamespace(runtime=types.SimpleNamespace(output_dir="out"))
    fedavg.HydraConfig = types.SimpleNamespace(get=lambda: runtime)
    config = OmegaConf.load(Path(spec["checkout"]) / "config" / "defaults.yaml")
    config.method, config.dataset.name, config.model.name = method, "cifar10", "benchmark"
    config.optimizer.lr = spec["rate"]
    config.common.update(
        # Half a client more, as it takes the floor of the product.
        join_ratio=min(1.0, (spec["cohort"] + 0.5) / clients),
        global_epoch=1,
        local_epoch=spec["epochs"],
        batch_size=spec["batch"],
        client_side_evaluation=False,
        save_log=False,
        verbose_gap=10**9,
        save_learning_curve_plot=False,
        save_metrics=False,
    )
    for place in (config.common.test.client, config.common.test.server):
        place.update(interval=-1, train=False, val=False, test=False)
    kind = getattr(importlib.import_module(f"src.server.{method}"), _SERVERS[method])
    config = parse_args(DictConfig(config), method, getattr(kind, "get_hyperparams", None))
    server = kind(args=config)

    def one_round() -> None:
        server.selected_clients = list(server.client_sample_stream[0])
        server.train_one_round()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with child.counting() as counted:
        one_round()
    names = ("torch", "torchvision", "ray", "hydra-core")
    return {**child.same(spec, *counted), "versions": child.versions(*names)}, one_round


if __name__ == "__main__":
    child.serve(prepare)
