"""FedRep: first the head with the body frozen, then the body with the head frozen."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm
from tests import cases, tiny
from tests.algorithms.served import KEY, served, trained

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.01


def make(training: Any = None, **settings: Any) -> Algorithm:
    federation = tiny.federated()[1]
    return algorithms.fedrep(tiny.Net(), training or cases.training(), federation, **settings)


def test_two_rounds_by_hand():
    """Full batches, kept momentum and decay, layer by layer."""
    settings = {"learning_rate": RATE, "momentum": MOMENTUM, "weight_decay": DECAY}
    training = local_training.sgd(**settings, batch_size=16, epochs=2, keep_optimizer=True)
    algorithm = make(training, head_epochs=3)
    data, state = tiny.federated()[0], algorithm.init(KEY)
    rows = data.train.rows[0, : data.train.size[0]]
    x, y = data.x[rows], data.y[rows]

    def loss(params: Any, stats: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        logits, new_stats = tiny.Net().apply(variables, x, train=True, mutable=["batch_stats"])
        cross = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return cross, new_stats["batch_stats"]

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    model = jax.tree.map(jnp.array, served(algorithm, state, 0))
    params, stats = model["params"], model["batch_stats"]
    trace = jax.tree.map(jnp.zeros_like, params)
    for _ in range(2):
        losses: dict[str, list[float]] = {"head": [], "body": []}
        for part, layers, epochs in (("head", ["fc2"], 3), ("body", ["fc1", "norm1"], 2)):
            for _ in range(epochs):
                (value, new_stats), grads = gradient(params, stats)
                losses[part].append(float(value))
                for name in layers:
                    for leaf, g in grads[name].items():
                        step = MOMENTUM * trace[name][leaf] + g + DECAY * params[name][leaf]
                        trace[name][leaf] = step
                        params[name][leaf] = params[name][leaf] - RATE * step
                if part == "body":
                    stats = new_stats
        upload, got, client, metrics = trained(algorithm, state, 0)
        expected = {"params": params, "batch_stats": stats}
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(metrics["loss"], np.mean(losses["body"]), rtol=1e-5)
        np.testing.assert_allclose(metrics["head_loss"], np.mean(losses["head"]), rtol=1e-5)
        stacked = jax.tree.map(lambda a: a[None], client)
        state = state._replace(server=upload, clients=stacked)


def test_steps_can_replace_epochs():
    """The upload equals the download, statistics included, if the body has no steps."""
    training = cases.training(epochs=None, steps=0)
    algorithms_by_steps = [make(training, head_steps=n) for n in (1, 3)]
    state = algorithms_by_steps[0].init(KEY)
    first, second = (trained(algorithm, state, 0) for algorithm in algorithms_by_steps)
    chex.assert_trees_all_equal(first.upload, state.server)
    chex.assert_trees_all_equal(second.upload, state.server)
    start = trees.row(state.clients.personal, 0)
    parts = start, first.client.personal, second.client.personal
    for a, b, c in zip(*map(jax.tree.leaves, parts), strict=True):
        assert (a != b).all()
        assert (b != c).all()
