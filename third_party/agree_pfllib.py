"""Runs methods of PFLlib (TsingZ0/PFLlib) on the work of `experiments.agree`.

The server's own `train` runs unchanged from the user's checkout. It evaluates after it has sent
models to clients; there the adapter records the parameters of server and clients instead. With a
seed it records, at the last evaluation, each client's test accuracy by PFLlib's count, and again
after the training that follows. Saving is left out, and so
is the Gumbel noise of FedCP, whose first context is that of the initial head. Needs torch,
torchvision, h5py, scikit-learn, matplotlib, and cvxpy for FedPAC.
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
import pfllib

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
    "moon": "servermoon.MOON",
    "fedlc": "serverlc.FedLC",
    "gpfl": "servergpfl.GPFL",
    "fedcp": "servercp.FedCP",
    "feddbe": "serverdbe.FedDBE",
    "fedcac": "servercac.FedCAC",
    "fedgh": "servergh.FedGH",
    "fml": "serverfml.FML",
}


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns facts about the library, and a function that does the next run at each call."""
    spec["checkout"] = str(Path(spec["checkout"]) / "system")
    child.checkout(spec, "numpy", "torch", "torchvision", "h5py", "sklearn", "matplotlib")
    child.check_methods(spec, _SERVERS)
    import torch

    torch.set_num_threads(1)  # more threads only wait with a network this small
    os.makedirs("system")
    os.chdir("system")
    runs = iter(spec["runs"])

    def run() -> None:
        make_run(next(runs))()

    return {"versions": child.versions("torch")}, run


def make_run(spec: child.Spec) -> Callable[[], None]:
    """Returns a function that trains with a server of PFLlib and writes its results."""
    method = spec["algorithm"]
    import numpy as np
    import state
    import torch
    from flcore.trainmodel.models import BaseHeadSplit

    work, start = state.read_work(spec["work"])
    clients, examples = work["y"].shape
    for i in range(clients):
        for part, prefix in (("train", ""), ("test", "test_" if "test_x" in work else "")):
            path = Path("..", "dataset", "work", part, f"{i}.npz")
            path.parent.mkdir(parents=True, exist_ok=True)
            data = {"x": work[f"{prefix}x"][i], "y": work[f"{prefix}y"][i]}
            np.savez(path, data=np.array(data, dtype=object))
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(0)
    module, name = _SERVERS[method].split(".")
    options = {
        **pfllib.OPTIONS,
        "dataset": "work",
        "num_classes": len(start["fc2.weight"]),
        "global_rounds": spec["rounds"],
        "algorithm": name,
        "device": "cpu",
        "local_epochs": spec["epochs"],
        "batch_size": spec.get("batch", examples),
        "local_learning_rate": spec["rate"],
        "model": BaseHeadSplit(*state.network(start)),
        "num_clients": clients,
        "join_ratio": 1.0,
        "fine_tuning_epochs": 0,
        **spec["settings"],
    }
    server_class = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    if method == "fedcp":
        torch.nn.functional.gumbel_softmax = lambda x, dim, **_: torch.softmax(x, dim)
    server = server_class(Namespace(**options), 0)
    for client in server.clients:
        state.set_added_parameters(method, client, work)
        if method == "gpfl":
            client.GCE_frozen = copy.deepcopy(client.GCE)
        if method == "fedcp":
            client.set_head_g(client.model.head_g)
    record, scores = state.Record(spec["out"]), state.Scores(spec["out"], clients)

    def client_parameters(client: Any) -> dict[str, Any]:
        """Returns the model that a client evaluates and its own head, or its control variates."""
        if method == "pfedme":  # trains its personal model anew
            return {}
        if method == "scaffold":
            return state.control_variates(start, client.client_c)
        model = client.model.model if method == "fedcp" else client.model
        parameters = state.parameters_of(getattr(client, "model_per", model))
        parameters |= state.added_parameters(method, client)
        if method == "fedcp":  # its head is the personal one
            head = {n: parameters.pop(n) for n in list(parameters) if n.startswith(state.HEAD)}
            parameters |= {f"own.{name}": value for name, value in head.items()}
        if method == "feddbe":
            parameters["own.bias"] = client.client_mean.detach().numpy().copy()
        if method == "fedrod":
            head = state.parameters_of(client.head)
            parameters |= {f"own.{name}": value for name, value in head.items()}
        return parameters

    def accuracy(client: Any) -> float:
        """Returns a client's test accuracy; from a copy, because some clients change in a test."""
        # FedCP's client cannot be copied, and does not change in a test.
        copied = client if method == "fedcp" else copy.deepcopy(client)
        test = getattr(copied, "test_metrics_personalized", copied.test_metrics)
        correct, count, *_ = test()
        return float(correct / count)

    def training_then_score(client: Any, train: Callable[..., None]) -> Callable[..., None]:
        def train_and_score(*arguments: Any) -> None:
            train(*arguments)
            if len(server.Budget) == spec["rounds"]:
                scores.after[client.id] = accuracy(client)

        return train_and_score

    def append_zero_scores() -> None:
        for name in ("rs_test_acc", "rs_test_acc_per", "rs_train_loss_per"):
            getattr(server, name, []).append(0.0)

    def score(*_: Any, **__: Any) -> None:
        append_zero_scores()
        if len(server.Budget) == spec["rounds"]:
            for client in server.clients:
                scores.before[client.id] = accuracy(client)

    recorded_rounds = set()

    def record_round(*_: Any, **__: Any) -> None:
        append_zero_scores()
        if len(server.Budget) in recorded_rounds:
            return
        recorded_rounds.add(len(server.Budget))
        model = getattr(server, "global_model", None)
        is_shared = model is not None and method != "fedproto"
        shared = state.parameters_of(model) if is_shared else {}
        if method == "scaffold":
            shared |= state.control_variates(start, server.global_c)
        if added := state.added_parameters(method, server.clients[0]):  # all have the server's
            shared = added | state.parameters_of(server.clients[0].model.base)
        if method == "fedcp":
            shared |= state.parameters_of(server.clients[0].model.head_g)
        record.add(shared, {client.id: client_parameters(client) for client in server.clients})

    by_score = "seed" in spec
    server.evaluate = server.evaluate_personalized = score if by_score else record_round
    server.save_results = server.save_global_model = lambda: None
    server.avg_generalization_metrics = lambda: 0.0  # FedAS calls it, and no class defines it
    if by_score:
        torch.manual_seed(spec["seed"])  # PFLlib's own is the same for all clients and runs
        train = "train_cs_model" if method == "fedcp" else "train"
        for client in server.clients:
            setattr(client, train, training_then_score(client, getattr(client, train)))

    def run() -> None:
        with contextlib.redirect_stdout(None):
            server.train()
        (scores if by_score else record).write()

    return run


if __name__ == "__main__":
    child.serve(prepare)
