"""Stand-in for PyTorch: shapes, hooks and steps."""

import contextlib
import math
import types

cuda = types.SimpleNamespace(is_available=lambda: False, synchronize=None)
device = str
_grad = [True]


class Tensor:
    """A shape."""

    def __init__(self, *shape):
        self.shape = shape

    def __len__(self):
        return self.shape[0]

    def numel(self):
        return math.prod(self.shape)

    def to(self, place):
        return self


def randn(*shape):
    return Tensor(*shape)


def randint(high, shape):
    return Tensor(*shape)


def is_grad_enabled():
    return _grad[-1]


@contextlib.contextmanager
def no_grad():
    _grad.append(False)
    yield
    _grad.pop()


from torch import nn, optim, utils  # noqa: E402, F401
