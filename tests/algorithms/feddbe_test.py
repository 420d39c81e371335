"""FedDBE against NumPy, on the network (x A) B with features x A."""

from functools import partial

import chex
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.feddbe import Client
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, deep, kernels, train_client

RATE, STEPS, PENALTY, MOMENTUM = 0.2, 3, 0.7, 0.4
C, BIAS = np.array([0.3, -0.8]), np.array([0.5, -0.2])


def objective(model, old_mean):
    """Returns cross-entropy of the shifted features plus the penalty on their moving mean."""
    z = X @ model["a"]
    mean = (1 - MOMENTUM) * old_mean + MOMENTUM * z.mean(0)
    outputs = linear.softmax((z + model["bias"]) @ model["head"])
    return PENALTY * np.mean((mean - C) ** 2) / 2 - np.mean(np.log(outputs[np.arange(4), Y]))


def make():
    return linear.make_classifier("feddbe", penalty=PENALTY, mean_momentum=MOMENTUM)


def server(mean_is_known):
    return {**deep(A, HEAD), "mean": jnp.float32(C), "known": jnp.asarray(mean_is_known)}


def test_one_round_by_hand():
    algorithm, data = make()
    model = {"a": A.copy(), "bias": BIAS.copy(), "head": HEAD.copy()}
    mean, losses = np.zeros(2), []
    for _ in range(STEPS):
        losses.append(objective(model, mean))
        slopes = linear.central_differences(partial(objective, model, mean), model)
        mean = (1 - MOMENTUM) * mean + MOMENTUM * (X @ model["a"]).mean(0)
        model = {name: model[name] - RATE * slopes[name] for name in model}
    payload, client = server(True), Client(jnp.float32(BIAS), ())
    result = train_client(algorithm, payload, client, data)
    body, head = kernels(result.upload)
    np.testing.assert_allclose(body, model["a"], rtol=2e-6)
    np.testing.assert_allclose(head, model["head"], rtol=2e-6)
    np.testing.assert_allclose(result.client.bias, model["bias"], rtol=1e-5)
    np.testing.assert_array_equal(result.upload["mean"], payload["mean"])  # no change to clip
    np.testing.assert_allclose(result.metrics["loss"], np.mean(losses), rtol=2e-6)
    # Before and after training, the client's bias is added to the features.
    served = algorithm.personalize(State(payload, (), ()), client, None)
    outputs = algorithm.predict(served, jnp.float32(X))
    np.testing.assert_allclose(outputs, (X @ A + BIAS) @ HEAD, rtol=1e-5, atol=1e-6)
    outputs = algorithm.predict(result.variables, jnp.float32(X))
    expected = (X @ model["a"] + model["bias"]) @ model["head"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_the_first_round_trains_like_fedavg_and_only_finds_the_mean():
    algorithm, data = make()
    fedavg, _ = linear.make_classifier("fedavg")
    expected = train_client(fedavg, deep(A, HEAD), (), data)
    payload, client = server(False), Client(jnp.zeros(2), ())
    result = train_client(algorithm, payload, client, data)
    chex.assert_trees_all_equal(result.upload["params"], expected.upload["params"])
    assert not result.client.bias.any()
    mean, a, head = np.zeros(2), A, HEAD
    for _ in range(STEPS):
        z = X @ a
        mean = (1 - MOMENTUM) * mean + MOMENTUM * z.mean(0)
        by_output = (linear.softmax(z @ head) - np.eye(3)[Y]) / 4
        a, head = a - RATE * X.T @ by_output @ head.T, head - RATE * z.T @ by_output
    np.testing.assert_allclose(result.upload["mean"], mean, rtol=1e-5)
    # The server averages by examples, and does not change the mean later.
    second_upload = {**deep(3 * A, HEAD), "mean": jnp.float32([1.0, 2.0])}
    state = State(payload, (), ())
    receive = partial(
        linear.receive, algorithm, counts=[4, 1], uploads=[result.upload, second_upload]
    )
    assert not receive(state=state, arrived=[False, False]).server["known"]
    state = receive(state=state, arrived=[True, True])
    mean = (4 * result.upload["mean"] + second_upload["mean"]) / 5
    np.testing.assert_allclose(state.server["mean"], mean, rtol=1e-6)
    chex.assert_trees_all_equal(state.server["params"], payload["params"])
    later = receive(state=state, arrived=[False, True])
    chex.assert_trees_all_equal(later.server["mean"], state.server["mean"])
    chex.assert_trees_all_equal(later.server["params"], second_upload["params"])
    # A client uploads its mean in the first round only, and its model in later ones.
    model_bytes = {"body": 4 * 4, "head": 4 * 6}
    for mean_is_known, up in (
        (False, {"body": 0, "head": 0, "mean": 8}),
        (True, {**model_bytes, "mean": 0}),
    ):
        traffic = algorithm.traffic(server(mean_is_known), result.upload)
        assert traffic.down == {**model_bytes, "mean": 8, "known": 1}
        assert traffic.up == up
