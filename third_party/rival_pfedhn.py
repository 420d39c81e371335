"""Runs the authors' pFedHN (AvivSham/pFedHN) on the benchmark's work, from the user's checkout.

Their training function runs unchanged and is timed from its first step to its last. The adapter
replaces CIFAR-10 by tensors of the same size, which saves the decoding of images, and the
evaluation of all clients by nothing. Each step also reads a test batch, here of one image, besides
the 3,200 images it trains on. Needs torch and tqdm.
"""

import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], float]]:
    """Returns facts about the code, and a function that trains and returns its seconds."""
    child.checkout(spec, "numpy", "torch", "tqdm")
    if spec["algorithm"] != "pfedhn":
        raise child.Lacks(f"it is pFedHN, not {spec['algorithm']}")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # only needed to load CIFAR-10
        for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
            sys.modules[name] = types.ModuleType(name)
        for name in ("CIFAR10", "CIFAR100"):
            setattr(sys.modules["torchvision.datasets"], name, None)
        sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]
    from experiments.pfedhn import trainer

    if spec["rounds"] * spec["local_steps"] != spec["client_steps"]:
        raise child.Lacks("it takes one client in each step")

    def images(examples: int) -> tuple[Any, Any]:
        return torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,))

    clients = range(spec["clients"])
    datasets = [TensorDataset(*images(spec["examples"])) for _ in clients]
    train = [DataLoader(dataset, spec["batch"], shuffle=True) for dataset in datasets]
    test = [[images(1)] for _ in clients]
    nodes = types.SimpleNamespace(train_loaders=train, val_loaders=test, test_loaders=test)
    span = [0.0, 0.0]

    class Clock:
        """Progress bar that only measures the time from the first step to the last."""

        def __init__(self, steps: int) -> None:
            self.steps = steps

        def __iter__(self) -> Any:
            span[0] = time.perf_counter()
            yield from range(self.steps)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            span[1] = time.perf_counter()

        def set_description(self, text: str) -> None:
            del text

    trainer.trange = Clock
    trainer.BaseNodes = lambda *args, **kwargs: nodes
    trainer.eval_model = lambda *args, **kwargs: ({}, 0.0, 0.0, [0.0])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def run_steps(number: int) -> float:
        # The defaults of their command line.
        trainer.train(
            data_name="cifar10",
            data_path="",
            classes_per_node=2,
            num_nodes=spec["clients"],
            steps=number,
            inner_steps=spec["local_steps"],
            optim="sgd",
            lr=1e-2,
            inner_lr=5e-3,
            embed_lr=None,
            wd=1e-3,
            inner_wd=5e-5,
            embed_dim=-1,
            hyper_hid=100,
            n_hidden=3,
            n_kernels=16,
            bs=spec["batch"],
            device=device,
            eval_every=10**9,
            save_path=Path("results"),
            seed=0,
        )
        return span[1] - span[0]

    few = min(2, spec["rounds"])  # warm-up; the other steps are the same
    with child.counting() as counts:
        run_steps(few)
    short = {**spec, "client_steps": few * spec["local_steps"]}
    facts = {**child.check_work(short, *counts), "client_steps": spec["client_steps"]}
    return {**facts, "versions": child.versions("torch")}, lambda: run_steps(spec["rounds"])


if __name__ == "__main__":
    child.serve(prepare)
