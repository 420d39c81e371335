"""PFLlib's FedAvg (TsingZ0/PFLlib) on the benchmark's work, from a checkout that the user has.

What it does in a round is run as it is: examples are read from a file for each client, and become a
list of tensors. Evaluation and results are left out. Needs torch, torchvision, h5py, scikit-learn.
"""

import contextlib
import os
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child

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
    """A server of theirs with clients of theirs; the network is ours."""
    spec["checkout"] = str(Path(spec["checkout"]) / "system")
    child.checkout(spec, "numpy", "torch", "h5py", "sklearn", "matplotlib")
    if spec["algorithm"] != "fedavg":
        raise child.Lacks(f"its adapter runs FedAvg, not {spec['algorithm']}")
    import numpy as np
    import torch
    from flcore.servers.serveravg import FedAvg
    from networks import NETWORKS

    # It reads ../dataset/NAME/{train,test}/CLIENT.npz. Clients who share a pool share files.
    os.makedirs("system")
    rng = np.random.default_rng(0)
    files = spec.get("pool", spec["clients"] * spec["examples"]) // spec["examples"]
    for i in range(spec["clients"]):
        for part, examples in (("train", spec["examples"]), ("test", 1)):
            path = Path("dataset", "Cifar10", part, f"{i}.npz")
            path.parent.mkdir(parents=True, exist_ok=True)
            if i >= files:
                os.link(path.with_name(f"{i % files}.npz"), path)
                continue
            x = rng.standard_normal((examples, 3, 32, 32), np.float32)
            data = {"x": x, "y": rng.integers(10, size=examples)}
            np.savez(path, data=np.array(data, dtype=object))
    os.chdir("system")
    random.seed(0)
    server = FedAvg(
        Namespace(
            **_OFF,
            dataset="Cifar10",
            num_classes=10,
            global_rounds=1,
            algorithm="FedAvg",
            device="cuda" if torch.cuda.is_available() else "cpu",
            local_epochs=spec["epochs"],
            batch_size=spec["batch"],
            local_learning_rate=spec["rate"],
            goal="",
            eval_gap=1,
            model=NETWORKS[spec["network"]]().to("cuda" if torch.cuda.is_available() else "cpu"),
            num_clients=spec["clients"],
            # Half a client more, as it takes the floor of the product.
            join_ratio=min(1.0, (spec["cohort"] + 0.5) / spec["clients"]),
            top_cnt=1,
            save_folder_name="items",
            time_threthold=1e9,
            batch_num_per_client=1,
            dlg_gap=1,
            learning_rate_decay_gamma=1.0,
        ),
        0,
    )

    def one_round() -> None:
        """What its `train` does between two evaluations."""
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with child.counting() as counted, contextlib.redirect_stdout(None):
        one_round()
    return {**child.same(spec, *counted), "versions": child.versions("torch")}, one_round


if __name__ == "__main__":
    child.serve(prepare)
