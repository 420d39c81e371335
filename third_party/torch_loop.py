"""FedAvg as a plain PyTorch loop, one client after the other; on CUDA if torch has it.

Written here for comparison, without code of others. Needs the extra `[bench]`.
"""

from collections.abc import Callable
from typing import Any

import child


def fedavg(spec: child.Spec) -> Callable[[], None]:
    """Returns a function that trains a cohort from the global model and averages its models."""
    import torch
    from networks import NETWORKS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clients, cohort, examples = spec["clients"], spec["cohort"], spec["examples"]
    # Inputs are random: timing depends only on shapes.
    images = torch.randn(clients, examples, 3, 32, 32, device=device)
    labels = torch.randint(10, (clients, examples), device=device)
    server, worker = (NETWORKS[spec["network"]]().to(device).train() for _ in range(2))
    loss = torch.nn.CrossEntropyLoss()

    def run_round() -> None:
        start = server.state_dict()
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for i in torch.randperm(clients)[:cohort].tolist():
            worker.load_state_dict(start)
            optimizer = torch.optim.SGD(worker.parameters(), lr=spec["rate"])
            for _ in range(spec["epochs"]):
                for batch in torch.randperm(examples, device=device).split(spec["batch"]):
                    optimizer.zero_grad(set_to_none=True)
                    loss(worker(images[i, batch]), labels[i, batch]).backward()
                    optimizer.step()
            for name, value in worker.state_dict().items():
                if value.is_floating_point():  # BatchNorm also counts its batches
                    total[name].add_(value, alpha=1 / cohort)
        server.load_state_dict(total)
        if device == "cuda":
            torch.cuda.synchronize()

    return run_round


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns facts about PyTorch, and a function that runs one round."""
    if spec["algorithm"] != "fedavg":
        raise child.Lacks(f"the loop is FedAvg's, not {spec['algorithm']}'s")
    import torch

    run_round = fedavg(spec)
    with child.counting() as counts:
        run_round()
    facts = child.check_work(spec, *counts)
    threads = torch.get_num_threads()
    return {**facts, "versions": child.versions("torch"), "threads": threads}, run_round


if __name__ == "__main__":
    child.serve(prepare)
