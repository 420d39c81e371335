"""Layers by their sizes."""

import types

import torch
from torch.nn.modules.module import Module

init = types.SimpleNamespace(xavier_uniform_=lambda weight: None)


class Sequential(Module):
    def __init__(self, *layers):
        vars(self).update({str(i): layer for i, layer in enumerate(layers)})

    def __iter__(self):
        return iter(vars(self).values())

    def __getitem__(self, at):
        found = list(self)[at]
        return Sequential(*found) if isinstance(at, slice) else found


class Linear(Module):
    def __init__(self, inputs, outputs):
        self.weight, self.bias = torch.Tensor(outputs, inputs), torch.Tensor(outputs)


class Conv2d(Module):
    def __init__(self, inputs, outputs, size, bias=True, **how):
        self.weight = torch.Tensor(outputs, inputs, size, size)
        if bias:
            self.bias = torch.Tensor(outputs)


class BatchNorm2d(Module):
    def __init__(self, size):
        self.weight, self.bias = torch.Tensor(size), torch.Tensor(size)


class _Plain(Module):
    def __init__(self, *how, **more):
        pass


class Flatten(_Plain):
    pass


class ReLU(_Plain):
    pass


class MaxPool2d(_Plain):
    pass


class AdaptiveMaxPool2d(_Plain):
    pass


class Dropout(_Plain):
    pass


class CrossEntropyLoss(_Plain):
    pass
