"""Runs FedAvg of PFLlib (TsingZ0/PFLlib) on the benchmark's work, from the user's checkout.

A round runs unchanged: it reads each client's examples from a file and makes a list of tensors of
them. Evaluation and results are left out. Needs torch, torchvision, h5py, scikit-learn.
"""

import contextlib
import os
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import pfllib


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns facts about the library, and a function that runs one round."""
    spec["checkout"] = str(Path(spec["checkout"]) / "system")
    child.checkout(spec, "numpy", "torch", "h5py", "sklearn", "matplotlib")
    if spec["algorithm"] != "fedavg":
        raise child.Lacks(f"its adapter runs FedAvg, not {spec['algorithm']}")
    import numpy as np
    import torch
    from flcore.servers.serveravg import FedAvg
    from networks import NETWORKS

    # PFLlib reads ../dataset/NAME/{train,test}/CLIENT.npz. Clients who share a pool share files.
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Namespace(
        **pfllib.OPTIONS,
        dataset="Cifar10",
        num_classes=10,
        global_rounds=1,
        algorithm="FedAvg",
        device=device,
        local_epochs=spec["epochs"],
        batch_size=spec["batch"],
        local_learning_rate=spec["rate"],
        model=NETWORKS[spec["network"]]().to(device),
        num_clients=spec["clients"],
        # Half a client more, because it takes the floor of the product.
        join_ratio=min(1.0, (spec["cohort"] + 0.5) / spec["clients"]),
    )
    server = FedAvg(options, 0)

    def run_round() -> None:
        """Repeats the part of the server's `train` that lies between two evaluations."""
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with child.counting() as counts, contextlib.redirect_stdout(None):
        run_round()
    return {**child.check_work(spec, *counts), "versions": child.versions("torch")}, run_round


if __name__ == "__main__":
    child.serve(prepare)
