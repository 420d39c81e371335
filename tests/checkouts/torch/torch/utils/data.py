"""Batches with the shapes of their tensors."""

import torch


class TensorDataset:
    def __init__(self, *tensors):
        self.tensors = tensors


class DataLoader:
    def __init__(self, dataset, batch_size, shuffle=False):
        self.dataset, self.size = dataset, batch_size

    def __iter__(self):
        total = len(self.dataset.tensors[0])
        for first in range(0, total, self.size):
            length = min(self.size, total - first)
            yield tuple(torch.Tensor(length, *t.shape[1:]) for t in self.dataset.tensors)
