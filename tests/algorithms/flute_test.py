"""FLUTE against NumPy, on the network (x A) B with features x A; class 1 has no example."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.flute import Momentum, collapse_gap
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

RATE, SERVER_RATE, HEAD_STEPS, STEPS = 0.2, 0.7, 2, 3
WEIGHTS = {"collapse": 0.3, "head_decay": 0.02, "feature_decay": 0.05}
PRESENT = np.array([1.0, 0.0, 1.0])


def gap(kernel, present=PRESENT):
    """Returns R as the paper writes it, for the kernel Wᵀ [d, C]."""
    w, (c, u) = kernel.T, (3, present[:, None])
    target = (np.eye(c) - np.ones((c, c)) / c) * (u @ u.T) / np.sqrt(c - 1)
    return np.linalg.norm(w @ w.T / np.linalg.norm(w @ w.T) - target)


def objective(model):
    z = X @ model["a"]
    cross_entropy = -np.log(linear.softmax(z @ model["head"])[np.arange(4), Y])
    return (
        np.mean(cross_entropy)
        + WEIGHTS["collapse"] * gap(model["head"])
        + WEIGHTS["head_decay"] * np.sum(model["head"] ** 2)
        + WEIGHTS["feature_decay"] * np.mean(np.sum(z**2, 1))
    )


def make(**settings):
    settings = {**WEIGHTS, "server_rate": SERVER_RATE, "head_epochs": HEAD_STEPS, **settings}
    return linear.make_classifier("flute", **settings)


def uploaded(a, head, present=PRESENT):
    return {**deep(a, head), "has_class": jnp.asarray(present) > 0}


def test_one_round_by_hand():
    algorithm, data = make()
    model, losses = {"a": A.copy(), "head": HEAD.copy()}, []
    for step in range(HEAD_STEPS + STEPS):
        losses.append(objective(model))
        slopes = linear.central_differences(partial(objective, model), model)
        model["head"] = model["head"] - RATE * slopes["head"]
        if step >= HEAD_STEPS:
            model["a"] = model["a"] - RATE * slopes["a"]
    result = train_client(algorithm, deep(A, HEAD), Momentum((), ()), data)
    chex.assert_trees_all_close(
        result.upload, uploaded(model["a"], model["head"]), rtol=1e-6, atol=1e-7
    )
    chex.assert_trees_all_equal({**result.variables}, deep(*kernels(result.upload)))
    np.testing.assert_allclose(result.metrics["head_loss"], np.mean(losses[:HEAD_STEPS]), rtol=1e-6)
    np.testing.assert_allclose(result.metrics["loss"], np.mean(losses[HEAD_STEPS:]), rtol=1e-6)


def test_the_server_averages_bodies_and_steps_on_the_heads_that_arrived():
    algorithm, _ = linear.make_classifier("flute", [X] * 3, [Y] * 3, server_rate=SERVER_RATE)
    state = algorithm.init(linear.KEY)
    presents = [PRESENT, np.ones(3), PRESENT]
    uploads = [uploaded((k + 1) * A, HEAD - k, presents[k]) for k in range(3)]
    after = linear.receive(algorithm, state, [4, 2, 9], uploads, [True, True, False])
    np.testing.assert_allclose(kernels(after.server)[0], (4 * A + 2 * 2 * A) / 6, rtol=1e-6)
    heads = after.rows["params"]["head"]["kernel"]
    for k in range(2):
        head = HEAD - k
        slopes = linear.central_differences(partial(gap, head, presents[k]), head)
        np.testing.assert_allclose(heads[k], head - SERVER_RATE / 2 * slopes, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(heads[2], state.rows["params"]["head"]["kernel"][2])
    served = algorithm.personalize(after, (), linear.context(make()[1], 1))
    np.testing.assert_array_equal(kernels(served)[1], heads[1])


def test_the_distance_is_zero_for_equal_angles_and_defined_at_zero():
    frame = np.eye(3) - 1 / 3  # rows of equal lengths with equal angles
    every = jnp.ones(3, bool)
    np.testing.assert_allclose(collapse_gap(jnp.float32(5 * frame), every), 0.0, atol=5e-7)
    value, slope = jax.value_and_grad(collapse_gap)(jnp.zeros((2, 3)), every)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    assert not slope.any()


def test_traffic_is_the_model_and_a_mask_of_classes():
    algorithm, data = make()
    state = algorithm.init(linear.KEY)
    payload = algorithm.send(state._replace(clients=()), linear.context(data))
    result = train_client(algorithm, payload, trees.row(state.clients, 0), data)
    traffic = algorithm.traffic(payload, result.upload)
    assert traffic.down == {"body": 4 * 4, "head": 4 * 6}
    assert traffic.up == {**traffic.down, "has_class": 3}


def test_phases_continue_the_method_or_start_from_a_model():
    algorithm, _ = make()
    state = algorithm.init(linear.KEY)
    state = state._replace(rows=jax.tree.map(lambda leaf: leaf + 1, state.rows))
    chex.assert_trees_all_equal(algorithm.init(jax.random.key(9), state), state)
    started = algorithm.init(linear.KEY, State(deep(A, HEAD), (), ()))
    np.testing.assert_array_equal(started.rows["params"]["head"]["kernel"][0], jnp.float32(HEAD))
    assert set(trees.layers(started.server)) == {"body"}


def test_a_head_that_is_not_dense_is_refused():
    class Scaled(linear.Deep):
        head = "scale"

        @linear.nn.compact
        def __call__(self, x, train=False, mask=None):
            return linear.nn.LayerNorm(name="scale")(linear.nn.Dense(3, name="body")(x))

    _, federation = linear.federated([X], [Y])
    federation = federation._replace(outputs=3, task=linear.CLASSES)
    with pytest.raises(UsageError, match=r"^flute .* scale of this network is not Dense"):
        algorithms.flute(Scaled(), local_training.sgd(steps=1), federation)
