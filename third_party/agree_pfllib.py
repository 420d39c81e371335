"""PFLlib's methods (TsingZ0/PFLlib) on the work of `experiments.agree`, from a checkout.

Their server's own `train` runs as it is. At the place of each of its evaluations, which it does
behind sending models to clients, it is written down what server and clients have; saving is left
out. Or, at the last of these places, how many test examples each client gets right by their own
count, as it is served there and after its training that follows. Needs torch, torchvision, h5py,
scikit-learn, matplotlib, and cvxpy for FedPAC.
"""

import contextlib
import copy
import importlib
import os
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child

_SERVERS = {
    "fedavg": "serveravg.FedAvg",
    "fedprox": "serverprox.FedProx",
    "fedper": "serverper.FedPer",
    "fedrep": "serverrep.FedRep",
    "fedbabu": "serverbabu.FedBABU",
    "fedrod": "serverrod.FedROD",
    "fedbn": "serverbn.FedBN",
    "lg_fedavg": "serverlg.LG_FedAvg",
    "pfedme": "serverpFedMe.pFedMe",
    "ditto": "serverditto.Ditto",
    "apfl": "serverapfl.APFL",
    "fedala": "serverala.FedALA",
    "scaffold": "serverscaffold.SCAFFOLD",
    "feddyn": "serverdyn.FedDyn",
    "fedpac": "serverpac.FedPAC",
    "fedas": "serveras.FedAS",
    "fedproto": "serverproto.FedProto",
}
_OFF = dict.fromkeys(
    (
        "random_join_ratio",
        "few_shot",
        "time_select",
        "auto_break",
        "dlg_eval",
        "learning_rate_decay",
        "train_slow_rate",
        "send_slow_rate",
        "client_drop_rate",
        "num_new_clients",
        "fine_tuning_epoch_new",
    ),
    0,
)


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """What does the next of the runs each time that it is called."""
    spec["checkout"] = str(Path(spec["checkout"]) / "system")
    child.checkout(spec, "numpy", "torch", "torchvision", "h5py", "sklearn", "matplotlib")
    for one in spec["runs"]:
        if one["algorithm"] not in _SERVERS:
            raise child.Lacks(f"its adapter does not run {one['algorithm']}")
    import torch

    torch.set_num_threads(1)  # for a network this small others only wait
    os.makedirs("system")
    os.chdir("system")
    runs = iter(spec["runs"])

    def run() -> None:
        served(next(runs))()

    return {"versions": child.versions("torch")}, run


def served(spec: child.Spec) -> Callable[[], None]:
    """A server of theirs with clients of theirs, whose rounds are recorded."""
    method = spec["algorithm"]
    import numpy as np
    import state
    import torch
    from flcore.trainmodel.models import BaseHeadSplit

    with np.load(spec["work"], allow_pickle=False) as stored:
        work = dict(stored)
    start = {name[6:]: value for name, value in work.items() if name.startswith("start/")}
    clients, examples = work["y"].shape
    for i in range(clients):
        for part, prefix in (("train", ""), ("test", "test_" if "test_x" in work else "")):
            path = Path("..", "dataset", "work", part, f"{i}.npz")
            path.parent.mkdir(parents=True, exist_ok=True)
            own = {"x": work[f"{prefix}x"][i], "y": work[f"{prefix}y"][i]}
            np.savez(path, data=np.array(own, dtype=object))
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(0)
    module, name = _SERVERS[method].split(".")
    settings = {
        **_OFF,
        "dataset": "work",
        "num_classes": len(start["fc2.weight"]),
        "global_rounds": spec["rounds"],
        "algorithm": name,
        "device": "cpu",
        "local_epochs": spec["epochs"],
        "batch_size": spec.get("batch", examples),
        "local_learning_rate": spec["rate"],
        "goal": "",
        "eval_gap": 1,
        "model": BaseHeadSplit(*state.network(start)),
        "num_clients": clients,
        "join_ratio": 1.0,
        "top_cnt": 1,
        "save_folder_name": "items",
        "time_threthold": 1e9,
        "batch_num_per_client": 1,
        "dlg_gap": 1,
        "learning_rate_decay_gamma": 1.0,
        "fine_tuning_epochs": 0,
        **spec["settings"],
    }
    server = getattr(importlib.import_module(f"flcore.servers.{module}"), name)(
        Namespace(**settings), 0
    )
    record = state.Record(spec["out"])

    def of_client(one: Any) -> dict[str, Any]:
        """The model that it evaluates, and what it keeps beside it."""
        if method == "pfedme":  # what is personal is trained anew in ours
            return {}
        found = state.of(getattr(one, "model_per", one.model))
        if method == "fedrod":
            found |= {f"own.{n}": v for n, v in state.of(one.head).items()}
        if method == "scaffold":
            own = state.in_order(start, one.client_c)
            found = {f"control.{n}": v for n, v in own.items()}
        return found

    scores = state.Scores(spec["out"], clients)

    def right(one: Any) -> float:
        """The share that it gets right; by a copy, as some of theirs change what they score."""
        copied = copy.deepcopy(one)
        found = getattr(copied, "test_metrics_personalized", copied.test_metrics)()
        return float(found[0] / found[1])

    def scored(one: Any, train: Callable[..., None]) -> Callable[..., None]:
        def trained(*arguments: Any) -> None:
            train(*arguments)
            if len(server.Budget) == spec["rounds"]:
                scores.after[one.id] = right(one)

        return trained

    def score(*_: Any, **__: Any) -> None:
        for name in ("rs_test_acc", "rs_test_acc_per", "rs_train_loss_per"):
            getattr(server, name, []).append(0.0)
        if len(server.Budget) == spec["rounds"]:
            for one in server.clients:
                scores.before[one.id] = right(one)

    def evaluate(*_: Any, **__: Any) -> None:
        server.rs_test_acc.append(0.0)
        for name in ("rs_test_acc_per", "rs_train_loss_per"):
            getattr(server, name, []).append(0.0)
        if getattr(evaluate, "round", -1) != len(server.Budget):
            evaluate.round = len(server.Budget)  # type: ignore[attr-defined]
            shared = getattr(server, "global_model", None)
            seen = {} if shared is None else state.of(shared)
            if method == "fedproto":
                seen = {}
            if method == "scaffold":
                own = state.in_order(start, server.global_c)
                seen |= {f"control.{n}": v for n, v in own.items()}
            record.add(seen, {one.id: of_client(one) for one in server.clients})

    by_score = "seed" in spec
    server.evaluate = server.evaluate_personalized = score if by_score else evaluate
    server.save_results = server.save_global_model = lambda: None
    server.avg_generalization_metrics = lambda: (
        0.0
    )  # which FedAS calls at its end, and is not there
    if by_score:
        torch.manual_seed(spec["seed"])  # theirs is the same for all clients and runs
        for one in server.clients:
            one.train = scored(one, one.train)

    def run() -> None:
        with contextlib.redirect_stdout(None):
            server.train()
        (scores if by_score else record).write()

    return run


if __name__ == "__main__":
    child.serve(prepare)
