"""Stands for FedJAX: clients' batches, and FedAvg by the gradient that it is given."""

from typing import NamedTuple

from fedjax import optimizers  # noqa: F401


class ShuffleRepeatBatchHParams(NamedTuple):
    batch_size: int
    num_epochs: int


class ClientDataset:
    def __init__(self, examples):
        self.examples = examples

    def shuffle_repeat_batch(self, how):
        whole = len(self.examples["y"])
        for _ in range(how.num_epochs):
            for first in range(0, whole, how.batch_size):
                yield {k: v[first : first + how.batch_size] for k, v in self.examples.items()}
