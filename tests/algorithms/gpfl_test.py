"""GPFL against NumPy, on the network (x A) B with features x A."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import HEAD, A, X, Y, train_client

pytestmark = pytest.mark.slow("programs of a method beside the four systems")

RATE, STEPS, PENALTY, DECAY = 0.2, 3, 0.7, 0.3
SHARES = np.array([0.75, 0.0, 0.25])
RNG = np.random.default_rng(41)
CATEGORIES = RNG.normal(size=(3, 2))
VALVE = {
    part: {
        f"{part}_linear": {"kernel": RNG.normal(size=(2, 2)), "bias": RNG.normal(size=2)},
        f"{part}_norm": {"scale": RNG.normal(size=2), "bias": RNG.normal(size=2)},
    }
    for part in ("gamma", "beta")
}
PARAMS = {
    "body": {"kernel": A},
    "head": {"kernel": HEAD},
    "categories": CATEGORIES,
    "valve": {**VALVE["gamma"], **VALVE["beta"]},
}


def route(params, condition):
    """Returns the features of X after the valve."""

    def vector(part):
        layer, norm = (params["valve"][f"{part}_{name}"] for name in ("linear", "norm"))
        v = np.maximum(condition @ layer["kernel"] + layer["bias"], 0)
        return (v - v.mean()) / np.sqrt(v.var() + 1e-5) * norm["scale"] + norm["bias"]

    z = X @ params["body"]["kernel"]
    return np.maximum((vector("gamma") + 1) * z + vector("beta"), 0)


def objective(params, decay=0.0):
    """Returns the loss of the four examples and the decay of V and C."""
    own = route(params, SHARES @ CATEGORIES / 3)
    shared = route(params, CATEGORIES.mean(0))
    categories = params["categories"]
    products = shared @ categories.T
    cosines = products / np.outer(*(np.linalg.norm(m, axis=1) for m in (shared, categories)))
    losses = [
        -np.log(linear.softmax(logits)[np.arange(4), Y])
        for logits in (own @ params["head"]["kernel"], cosines)
    ]
    distances = np.linalg.norm(shared - CATEGORIES[Y], axis=1)
    decayed = jax.tree.leaves((params["valve"], categories))
    squares = sum(np.sum(leaf**2) for leaf in decayed)
    return np.mean(sum(losses) + PENALTY * distances) + decay / 2 * squares


def test_one_round_by_hand():
    algorithm, data = linear.make_classifier("gpfl", penalty=PENALTY, decay=DECAY)
    state = jax.jit(algorithm.init)(linear.KEY)
    start = jax.tree.map(jnp.float32, {"params": PARAMS})
    head, shared = trees.split(start, {"head"})
    client = trees.row(state.clients, 0)._replace(head=head)
    assert (route(PARAMS, CATEGORIES.mean(0)) > 0).any(1).all()
    params, losses = jax.tree.map(np.copy, PARAMS), []
    for _ in range(STEPS):
        losses.append(objective(params))
        slopes = linear.central_differences(partial(objective, params, DECAY), params)
        params = jax.tree.map(lambda p, slope: p - RATE * slope, params, slopes)
    result = train_client(algorithm, shared, client, data)
    trained = trees.join(result.upload, result.client.head)["params"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), trained, params)
    np.testing.assert_allclose(result.metrics["loss"], np.mean(losses), rtol=1e-6)
    # The condition is that of the download, before training and after.
    context = linear.context(data)
    served = algorithm.personalize(State(shared, (), ()), client, context)
    for variables, expected in ((served, PARAMS), (result.variables, params)):
        outputs = algorithm.predict(variables, jnp.float32(X))
        by_hand = route(expected, SHARES @ CATEGORIES / 3) @ expected["head"]["kernel"]
        np.testing.assert_allclose(outputs, by_hand, rtol=1e-5, atol=1e-6)
    # The server averages all that is shared by examples. The head is not sent.
    uploads = [result.upload, shared]
    state = linear.receive(algorithm, State(shared, (), ()), [4, 1], uploads, [True, True])
    mean = (4 * result.upload["params"]["categories"] + shared["params"]["categories"]) / 5
    np.testing.assert_allclose(state.server["params"]["categories"], mean, rtol=1e-6)
    traffic = algorithm.traffic(shared, result.upload)
    layers = [f"valve/{part}_{name}" for part in ("beta", "gamma") for name in ("linear", "norm")]
    valve = dict(zip(layers, (24, 16) * 2, strict=True))
    assert traffic.down == traffic.up == {"body": 16, "categories": 24, **valve}


def test_starts_of_phases():
    """Clients start with the body and head of FedAvg's model, or with the state of GPFL."""
    algorithm, _ = linear.make_classifier("gpfl", [X] * 2, [Y] * 2)
    fedavg, _ = linear.make_classifier("fedavg", [X] * 2, [Y] * 2)
    start = fedavg.init(jax.random.key(8))
    state = algorithm.init(linear.KEY, start)
    model = trees.join(state.server, trees.row(state.clients.head, 1))["params"]
    shared_layers = {name: model[name] for name in ("body", "head")}
    chex.assert_trees_all_equal(shared_layers, start.server["params"])
    chex.assert_trees_all_equal(algorithm.init(jax.random.key(9), state), state)
