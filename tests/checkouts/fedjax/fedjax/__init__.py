"""Stand-in for FedJAX: batches of clients, and FedAvg with a given gradient function."""

from typing import NamedTuple

from fedjax import optimizers  # noqa: F401


class ShuffleRepeatBatchHParams(NamedTuple):
    batch_size: int
    num_epochs: int


class ClientDataset:
    def __init__(self, examples):
        self.examples = examples

    def shuffle_repeat_batch(self, hparams):
        size = len(self.examples["y"])
        for _ in range(hparams.num_epochs):
            for first in range(0, size, hparams.batch_size):
                yield {k: v[first : first + hparams.batch_size] for k, v in self.examples.items()}
