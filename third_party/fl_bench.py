"""Set-up of an FL-bench server (KarhouTam/FL-bench) that both of its adapters use."""

import importlib
import json
import pickle
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NEEDS = (
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


def write_partition(
    folder: Path, train: Sequence[Sequence[int]], test: Sequence[Sequence[int]]
) -> None:
    """Writes a dataset folder with the row numbers of each client's examples.

    Args:
      folder: The folder, created if missing.
      train: Rows of each client's training examples.
      test: Rows of each client's test examples.
    """
    clients = list(range(len(train)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"split": "sample"}))
    split = {
        "separation": {"train": clients, "val": [], "test": clients, "total": len(clients)},
        "data_indices": [{"train": train[i], "val": [], "test": test[i]} for i in clients],
    }
    (folder / "partition.pkl").write_bytes(pickle.dumps(split))


def make_server(
    checkout: str,
    server: tuple[str, str],
    names: tuple[str, str],
    rate: float,
    common: Mapping[str, Any],
    *,
    test: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a server of the checkout, with logging and evaluation switched off.

    Args:
      checkout: Folder of the checkout.
      server: Its module below `src.server` and the class in it.
      names: Names of the dataset and the network.
      rate: Learning rate of the clients.
      common: Options of the group `common`.
      test: Whether the server prepares evaluations on test examples.
      settings: Settings of the method. Default: those of the checkout.
    """
    from omegaconf import DictConfig, OmegaConf
    from src.server import fedavg
    from src.utils.functional import parse_args

    module, class_name = server
    fedavg.FLBENCH_ROOT = Path.cwd()
    runtime = types.SimpleNamespace(runtime=types.SimpleNamespace(output_dir="out"))
    fedavg.HydraConfig = types.SimpleNamespace(get=lambda: runtime)
    config = OmegaConf.load(Path(checkout) / "config" / "defaults.yaml")
    config.method = module
    config.dataset.name, config.model.name = names
    config.optimizer.lr = rate
    if settings is not None:
        config[module] = settings
    config.common.update(
        client_side_evaluation=False,
        save_log=False,
        verbose_gap=10**9,
        save_learning_curve_plot=False,
        save_metrics=False,
        **common,
    )
    for group in (config.common.test.client, config.common.test.server):
        group.update(interval=-1, train=False, val=False, test=test)
    if test:  # FedBABU reads it even without evaluations
        config.common.test.client.finetune_epoch = 1
    kind = getattr(importlib.import_module(f"src.server.{module}"), class_name)
    config = parse_args(DictConfig(config), module, getattr(kind, "get_hyperparams", None))
    return kind(args=config)
