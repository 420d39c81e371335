"""The same local training as ours in plain, good PyTorch: one client after the other.

Written here for comparison; it contains no code of others. Needs the extra `[bench]`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn


def lenet(outputs: int = 10) -> nn.Module:
    """The network of `fedjax_pfl.models.LeNet` with its defaults, on 32x32x3 images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )


def fedavg_round(
    x: np.ndarray, y: np.ndarray, *, steps: int, batch_size: int, rate: float
) -> Callable[[], float]:
    """A function that runs one round: every client's steps from the global model, then the mean.

    Args:
      x: float32 [clients, examples, H, W, C], normalised; y: int [clients, examples].
    Returns:
      A function of nothing; it returns the mean loss of the last steps.
    """
    images = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 1, 4, 2, 3)))
    labels = torch.from_numpy(y.astype(np.int64))
    clients, examples = labels.shape
    server, worker, loss = lenet(), lenet(), nn.CrossEntropyLoss()

    def one_round() -> float:
        start = {name: value.clone() for name, value in server.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        last = 0.0
        for i in range(clients):
            worker.load_state_dict(start)
            optimizer = torch.optim.SGD(worker.parameters(), lr=rate)
            for _ in range(steps):
                batch = torch.randperm(examples)[:batch_size]
                optimizer.zero_grad(set_to_none=True)
                value = loss(worker(images[i, batch]), labels[i, batch])
                value.backward()
                optimizer.step()
            last += float(value.detach()) / clients
            for name, parameter in worker.state_dict().items():
                total[name] += parameter / clients
        server.load_state_dict(total)
        return last

    return one_round
