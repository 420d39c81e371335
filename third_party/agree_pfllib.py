"""PFLlib's methods (TsingZ0/PFLlib) on the work of `experiments.agree`, from a checkout.

Their server's own `train` runs as it is. At the place of each of its evaluations, which it does
behind sending models to clients, it is written down what server and clients have; saving is left
out. Needs torch, torchvision, h5py, scikit-learn, matplotlib.
"""

import contextlib
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
    """A server of theirs with clients of theirs, whose rounds are recorded."""
    spec["checkout"] = str(Path(spec["checkout"]) / "system")
    child.checkout(spec, "numpy", "torch", "torchvision", "h5py", "sklearn", "matplotlib")
    method = spec["algorithm"]
    if method not in _SERVERS:
        raise child.Lacks(f"its adapter does not run {method}")
    import numpy as np
    import state
    import torch
    from flcore.trainmodel.models import BaseHeadSplit

    with np.load(spec["work"], allow_pickle=False) as stored:
        work = dict(stored)
    start = {name[6:]: value for name, value in work.items() if name.startswith("start/")}
    clients, examples = work["y"].shape
    os.makedirs("system")
    for i in range(clients):
        for part in ("train", "test"):
            path = Path("dataset", "work", part, f"{i}.npz")
            path.parent.mkdir(parents=True, exist_ok=True)
            own = {"x": work["x"][i], "y": work["y"][i]}
            np.savez(path, data=np.array(own, dtype=object))
    os.chdir("system")
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(0)
    module, name = _SERVERS[method].split(".")
    settings = {
        **_OFF,
        "dataset": "work",
        "num_classes": int(work["y"].max()) + 1,
        "global_rounds": spec["rounds"],
        "algorithm": name,
        "device": "cpu",
        "local_epochs": spec["epochs"],
        "batch_size": examples,
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

    server.evaluate = server.evaluate_personalized = evaluate
    server.save_results = server.save_global_model = lambda: None

    def run() -> None:
        with contextlib.redirect_stdout(None):
            server.train()
        record.write()

    return {"versions": child.versions("torch")}, run


if __name__ == "__main__":
    child.serve(prepare)
