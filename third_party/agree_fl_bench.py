"""FL-bench's methods (KarhouTam/FL-bench) on the work of `experiments.agree`, from a checkout.

Their server's rounds run as they are, with evaluation switched off by their own settings; what they
have after each is written down. Or, in one more round, what share of test examples each client gets
right by their own count, before and after its training. What is replaced: the dataset, the network,
and what Hydra would say of the run. Needs what `rival_fl_bench.py` needs, and cvxpy for FedPAC.
"""

import importlib
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
# Their file, which is the method's name, and the server's class
_SERVERS = {
    "fedavg": ("fedavg", "FedAvgServer"),
    "fedprox": ("fedprox", "FedProxServer"),
    "fedper": ("fedper", "FedPerServer"),
    "fedrep": ("fedrep", "FedRepServer"),
    "fedbabu": ("fedbabu", "FedBabuServer"),
    "fedrod": ("fedrod", "FedRoDServer"),
    "fedbn": ("fedbn", "FedBNServer"),
    "lg_fedavg": ("lgfedavg", "LGFedAvgServer"),
    "pfedme": ("pfedme", "pFedMeServer"),
    "ditto": ("ditto", "DittoServer"),
    "apfl": ("apfl", "APFLServer"),
    "fedala": ("fedala", "FedALAServer"),
    "scaffold": ("scaffold", "SCAFFOLDServer"),
    "feddyn": ("feddyn", "FedDynServer"),
    "fedpac": ("fedpac", "FedPACServer"),
    "fedas": ("fedas", "FedASServer"),
}


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """What does the next of the runs each time that it is called."""
    child.checkout(spec, *_NEEDS)
    for one in spec["runs"]:
        if one["algorithm"] not in _SERVERS:
            raise child.Lacks(f"its adapter does not run {one['algorithm']}")
    import torch

    torch.set_num_threads(1)  # for a network this small others only wait
    runs = iter(spec["runs"])

    def run() -> None:
        served(spec["checkout"], next(runs))()

    return {"versions": child.versions("torch")}, run


def served(checkout: str, spec: child.Spec) -> Callable[[], None]:
    """A server of theirs, whose rounds are recorded."""
    method = spec["algorithm"]
    import numpy as np
    import state
    import torch
    from data.utils.datasets import DATASETS
    from omegaconf import DictConfig, OmegaConf
    from src.server import fedavg
    from src.utils.functional import parse_args
    from src.utils.models import MODELS, DecoupledModel

    with np.load(spec["work"], allow_pickle=False) as stored:
        work = dict(stored)
    start = {name[6:]: value for name, value in work.items() if name.startswith("start/")}
    clients, examples = work["y"].shape
    parts = ("x", "test_x") if "test_x" in work else ("x",)
    features = work["x"].shape[-1]
    x = torch.from_numpy(np.concatenate([work[p].reshape(-1, features) for p in parts]))
    labels = [work[p.replace("x", "y")].reshape(-1) for p in parts]
    y = torch.from_numpy(np.concatenate(labels).astype(np.int64))
    own = [list(range(i * examples, (i + 1) * examples)) for i in range(clients)]
    tests = np.arange(clients * examples, len(y)).reshape(clients, -1).tolist()
    everyone = list(range(clients))
    folder = Path("data/mnist")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"split": "sample"}))
    split = {
        "separation": {"train": everyone, "val": [], "test": everyone, "total": clients},
        "data_indices": [{"train": own[i], "val": [], "test": tests[i]} for i in everyone],
    }
    (folder / "partition.pkl").write_bytes(pickle.dumps(split))

    class Examples(torch.utils.data.Dataset):
        """As they are."""

        data, targets, classes = x, y, list(range(10))

        def __init__(self, **_: Any) -> None:
            """What would normalise them is not used."""

        def __getitem__(self, index: int) -> Any:
            return x[index], y[index]

        def __len__(self) -> int:
            return len(y)

        def train(self) -> None:
            """There is nothing to switch."""

        eval = train

    class Network(DecoupledModel):
        """Ours, cut where they want it to be."""

        def __init__(self, dataset: str, pretrained: bool) -> None:
            super().__init__()
            self.base, self.classifier = state.network(start)

    DATASETS["mnist"], MODELS["ours"] = Examples, Network
    fedavg.FLBENCH_ROOT = Path.cwd()
    runtime = types.SimpleNamespace(runtime=types.SimpleNamespace(output_dir="out"))
    fedavg.HydraConfig = types.SimpleNamespace(get=lambda: runtime)
    config = OmegaConf.load(Path(checkout) / "config" / "defaults.yaml")
    file, name = _SERVERS[method]
    config.method, config.dataset.name, config.model.name = file, "mnist", "ours"
    config.optimizer.lr = spec["rate"]
    config[file] = spec["settings"]
    if method == "fedpac":
        config[file].classifier_lr = spec["rate"]
    config.common.update(
        join_ratio=1.0,
        global_epoch=spec["rounds"] + 1,
        local_epoch=spec["epochs"],
        batch_size=spec.get("batch", examples),
        client_side_evaluation=False,
        use_cuda=False,
        save_log=False,
        verbose_gap=10**9,
        save_learning_curve_plot=False,
        save_metrics=False,
    )
    for place in (config.common.test.client, config.common.test.server):
        place.update(interval=-1, train=False, val=False, test=True)
    config.common.test.client.finetune_epoch = 1  # FedBABU asks for it; nothing is evaluated
    kind = getattr(importlib.import_module(f"src.server.{file}"), name)
    config = parse_args(DictConfig(config), file, getattr(kind, "get_hyperparams", None))
    server = kind(args=config)
    record = state.Record(spec["out"])

    def of_client(i: int) -> dict[str, Any]:
        """The model that it is evaluated with, and what it keeps beside it."""
        if method == "scaffold":
            own = state.in_order(start, server.c_local[i])
            return {f"control.{n}": v for n, v in own.items()}
        if method == "pfedme":  # what is personal is trained anew in ours
            return {}
        package = server.package(i)
        for key in ("personalized_model_params", "local_model_params", "prev_model_state"):
            if package.get(key):
                return state.named(package[key])
        return state.named({**package["regular_model_params"], **package["personal_model_params"]})

    def note() -> None:
        shared = state.named(server.public_model_params)
        if method == "scaffold":
            own = state.in_order(start, server.c_global)
            shared |= {f"control.{n}": v for n, v in own.items()}
        record.add(shared, {i: of_client(i) for i in everyone})

    def play(t: int) -> None:
        server.current_epoch = t
        server.selected_clients = list(server.client_sample_stream[t])
        server.train_one_round()

    def run() -> None:
        note()
        for t in range(spec["rounds"]):
            play(t)
            note()
        record.write()

    def run_scored() -> None:
        scores, last = state.Scores(spec["out"], clients), spec["rounds"]
        torch.manual_seed(spec["seed"])
        for t in range(last):
            play(t)
        server.args.common.client_side_evaluation = True
        play(last)
        for i in everyone:
            found = server.client_metrics[i][last]
            scores.before[i] = found["before"]["test"].accuracy / 100
            scores.after[i] = found["after"]["test"].accuracy / 100
        scores.write()

    return run_scored if "seed" in spec else run


if __name__ == "__main__":
    child.serve(prepare)
