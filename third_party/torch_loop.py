"""FedAvg in plain, good PyTorch: one client after the other. On CUDA where torch has it.

Written here for comparison; it contains no code of others. Needs the extra `[bench]`.
"""

from collections.abc import Callable
from typing import Any

import child


def fedavg(spec: child.Spec) -> Callable[[], None]:
    """A function that runs one round: the cohort's steps from the global model, then the mean."""
    import torch
    from networks import NETWORKS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clients, cohort, examples = spec["clients"], spec["cohort"], spec["examples"]
    # Values do not matter to the time, sizes do.
    images = torch.randn(clients, examples, 3, 32, 32, device=device)
    labels = torch.randint(10, (clients, examples), device=device)
    server, worker = (NETWORKS[spec["network"]]().to(device).train() for _ in range(2))
    loss = torch.nn.CrossEntropyLoss()

    def one_round() -> None:
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

    return one_round


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """Warm, and with the work that it did."""
    if spec["algorithm"] != "fedavg":
        raise child.Lacks(f"the loop is FedAvg's, not {spec['algorithm']}'s")
    import torch

    work = fedavg(spec)
    with child.counting() as counted:
        work()
    about = child.same(spec, *counted)
    threads = torch.get_num_threads()
    return {**about, "versions": child.versions("torch"), "threads": threads}, work


if __name__ == "__main__":
    child.serve(prepare)
