"""Layers with the shapes of their parameters."""

import types

import torch
from torch.nn.modules.module import Module

init = types.SimpleNamespace(xavier_uniform_=lambda weight: None)


class Sequential(Module):
    def __init__(self, *layers):
        vars(self).update({str(i): layer for i, layer in enumerate(layers)})

    def __iter__(self):
        return iter(vars(self).values())

    def __getitem__(self, index):
        layers = list(self)[index]
        return Sequential(*layers) if isinstance(index, slice) else layers


class Linear(Module):
    def __init__(self, inputs, outputs):
        self.weight, self.bias = torch.Tensor(outputs, inputs), torch.Tensor(outputs)


class Conv2d(Module):
    def __init__(self, inputs, outputs, size, bias=True, **options):
        self.weight = torch.Tensor(outputs, inputs, size, size)
        if bias:
            self.bias = torch.Tensor(outputs)


class BatchNorm2d(Module):
    def __init__(self, size):
        self.weight, self.bias = torch.Tensor(size), torch.Tensor(size)


class _WithoutParameters(Module):
    def __init__(self, *args, **options):
        pass


class Flatten(_WithoutParameters):
    pass


class ReLU(_WithoutParameters):
    pass


class MaxPool2d(_WithoutParameters):
    pass


class AdaptiveMaxPool2d(_WithoutParameters):
    pass


class Dropout(_WithoutParameters):
    pass


class CrossEntropyLoss(_WithoutParameters):
    pass
