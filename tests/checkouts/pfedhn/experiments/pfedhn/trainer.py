"""Stand-in for the trainer of the authors: a target of 121,182 parameters and a hypernetwork."""

import torch
import torchvision.transforms  # noqa: F401
from torch.optim import SGD
from torchvision.datasets import CIFAR10, CIFAR100  # noqa: F401
from tqdm import trange


class BaseNodes:
    """Would read CIFAR10."""


def eval_model(*_, **__):
    raise AssertionError("all clients are evaluated")


def train(
    data_name,
    data_path,
    classes_per_node,
    num_nodes,
    steps,
    inner_steps,
    optim,
    lr,
    inner_lr,
    embed_lr,
    wd,
    inner_wd,
    embed_dim,
    hyper_hid,
    n_hidden,
    n_kernels,
    bs,
    device,
    eval_every,
    save_path,
    seed,
):
    nodes = BaseNodes(
        data_name, data_path, num_nodes, classes_per_node=classes_per_node, batch_size=bs
    )
    inner, outer, loss = (
        SGD([torch.Tensor(121_182)]),
        SGD([torch.Tensor(7)]),
        torch.nn.CrossEntropyLoss(),
    )
    bar = trange(steps)
    for step in bar:
        with torch.no_grad():
            loss(*next(iter(nodes.test_loaders[step % num_nodes])))
        for _ in range(inner_steps):
            loss(*next(iter(nodes.train_loaders[step % num_nodes])))
            inner.step()
        outer.step()
        bar.set_description(f"{step}")
        if step % eval_every == 0:
            eval_model(nodes)
