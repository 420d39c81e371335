"""Stand-in for the optimisers of PyTorch; a step changes nothing."""

from torch.optim.optimizer import SGD  # noqa: F401
