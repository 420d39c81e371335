"""Methods that compute means in float32 keep the dtypes of a network in bfloat16."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.algorithms.fedem import Mixture
from fedjax_pfl.algorithms.shared.class_features import class_features
from fedjax_pfl.algorithms.shared.matching import cosines
from fedjax_pfl.core import offload, trees
from fedjax_pfl.simulation.rounds import round_functions
from tests import cases, tiny
from tests.algorithms import linear


class Narrow(nn.Module):
    """Two dense layers with parameters in bfloat16."""

    outputs: int = 3
    head = "fc2"
    layers = ("fc1", "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        x = nn.relu(nn.Dense(8, name="fc1", **dtypes)(x))
        return nn.Dense(self.outputs, name="fc2", **dtypes)(x)


DATA, FEDERATION = tiny.federated()


def make(name: str) -> Any:
    training = pfl.local_sgd(0.1, steps=1, momentum=0.9, keep_optimizer=True)
    settings = cases.CASES[name].settings
    return cases.FACTORIES[name](Narrow(), training, FEDERATION, **settings)


def test_cosines_are_computed_in_float32():
    """In bfloat16 that of nearly equal rows would be 1."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=4096) + 0.2 * rng.normal(size=(3, 4096)), jnp.bfloat16)
    exact = np.asarray(rows, np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    expected = exact @ exact.T
    assert expected.min() < 0.97
    np.testing.assert_allclose(cosines(rows), expected, rtol=1e-5)


def test_statistics_of_classes_are_computed_in_float32():
    """A sum in bfloat16 cannot count beyond 256."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0.5, 1.5, (3000, 4)), rng.integers(0, 3, 3000)
    data, _ = linear.federated([x], [y])
    data = data._replace(y=jnp.asarray(y, jnp.int32))
    statistics = class_features(Outputs(None), {}, linear.context(data).data, 3)
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    np.testing.assert_array_equal(statistics.counts, np.bincount(y))
    expected = np.stack([rounded[y == c].mean(0) for c in range(3)])
    np.testing.assert_allclose(statistics.means, expected, rtol=1e-5)
    np.testing.assert_allclose(statistics.mean_square, (rounded**2).sum(1).mean(), rtol=1e-5)


def test_probabilities_of_fedems_mixture_sum_to_1():
    outputs = jnp.asarray(np.random.default_rng(0).normal(0, 3, (2, 8, 5)), jnp.bfloat16)
    variables = {"components": outputs, "pi": jnp.array([0.25, 0.75])}
    log_probabilities = Mixture(Outputs(lambda component: component)).apply(variables, None)
    np.testing.assert_allclose(np.exp(log_probabilities).sum(-1), 1, rtol=1e-5)


def test_fedamps_weights_are_computed_in_float32():
    algorithm = make("fedamp")
    rng = np.random.default_rng(0)
    state = algorithm.init(jax.random.key(0))
    rows = jax.tree.map(lambda r: jnp.asarray(rng.normal(1, 0.1, r.shape), r.dtype), state.rows)
    xi, expected = (
        algorithm.observe(state._replace(rows=tree))["xi"]
        for tree in (rows, trees.at_least_float32(rows))
    )
    assert jax.tree.leaves(rows)[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(xi, expected, rtol=1e-5)


def test_pfedgraphs_cosines_are_computed_in_float32():
    """With a small α, the cosines of nearly equal updates decide about the weights."""
    network, training = Narrow(), pfl.local_sgd(0.1, steps=1)
    algorithm = pfl.pfedgraph(network, training, FEDERATION, alpha=0.01)
    state = algorithm.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    common = jax.tree.map(lambda r: rng.normal(0, 1, r.shape[1:]), state.rows)
    uploads = jax.tree.map(
        lambda r, c: jnp.asarray(c + rng.normal(0, 0.1, r.shape), r.dtype), state.rows, common
    )
    ids = range(FEDERATION.clients)

    def mixed(state: Any, uploads: Any) -> Any:
        parts = [trees.row(uploads, i) for i in ids]
        new = linear.receive(algorithm, state, [5 for _ in ids], parts, [True for _ in ids])
        return trees.at_least_float32(new.rows)

    expected = mixed(trees.at_least_float32(state), trees.at_least_float32(uploads))
    chex.assert_trees_all_close(mixed(state, uploads), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.slow("two programs of local training")
def test_scaffolds_control_does_not_depend_on_the_number_of_equal_steps():
    """The step is so small that all gradients are equal; in bfloat16 their sum would stop."""

    def control(steps: int) -> Any:
        training = pfl.local_sgd(1e-30, steps=steps, batch_size=64)
        with jax.numpy_dtype_promotion("standard"):
            algorithm = pfl.scaffold(Narrow(), training, FEDERATION)
            rounds = round_functions(algorithm, FEDERATION, cohort=FEDERATION.clients)
            key, first, count = jax.random.key(0), jnp.int32(0), jnp.int32(1)
            state, _ = jax.jit(rounds.run)(key, rounds.init(key), DATA, first, count)
        return trees.at_least_float32(state.server["control"])

    expected = control(1)
    assert trees.squared_norm(expected) > 0.01
    chex.assert_trees_all_close(control(600), expected, rtol=2**-6, atol=1e-3)


class Outputs:
    """A network whose outputs are a function of its variables, and whose features are x."""

    def __init__(self, outputs: Any):
        self.outputs = outputs

    def apply(self, variables: Any, x: Any) -> Any:
        return self.outputs(variables) if self.outputs else (None, x.astype(jnp.bfloat16))


@pytest.mark.slow("traces a round of each method")
@pytest.mark.parametrize("name", [n for n in cases.NAMES if n != "fedbn"])  # it needs BatchNorm
def test_a_round_keeps_the_dtypes_of_the_state(name: str):
    with jax.numpy_dtype_promotion("standard"):  # as for users; the tests are strict
        rounds = round_functions(make(name), FEDERATION, cohort=FEDERATION.clients)
        key, t = jax.random.key(0), jnp.int32(0)
        state = jax.eval_shape(rounds.init, key)
        new_state, _ = jax.eval_shape(rounds.run, key, state, DATA, t, t)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


@pytest.mark.slow("a program for each method")
@pytest.mark.parametrize("name", ["apfl", "fedavg", "pfedla"])
def test_a_parameter_is_two_bytes_of_an_upload(name: str):
    with jax.numpy_dtype_promotion("standard"):
        examples = pfl.PartitionedData(DATA, FEDERATION)
        simulation = pfl.Simulation(make(name), examples, evaluate_after=False)
        _, log = simulation.run_round(simulation.init(), 0)
    sent = sum(log.bytes_up_by_layer[layer] for layer in ("fc1", "fc2"))
    assert sent == FEDERATION.clients * 2 * (5 * 8 + 8 + 8 * 3 + 3)


@pytest.mark.slow("programs of three means for each number of clients")
@pytest.mark.parametrize("clients", [3, 7, 10])
def test_a_mean_has_no_bias(clients: int):
    """Shares of 1/7 in bfloat16 would sum to 0.998, and every round would shrink the model.

    One rounding to bfloat16 hides that in most entries, but not in the sum of 4,096.
    """
    rows = np.random.default_rng(clients).uniform(1, 2, (clients, 4096))
    stacked = jnp.asarray(rows, jnp.bfloat16)
    expected = np.asarray(stacked, np.float64).mean(0).sum()
    weights = jnp.ones(clients)
    offloaded = offload.Offloaded(
        source=Stored(np.asarray(stacked)),
        k=0,
        shape=stacked.shape,
        dtype=stacked.dtype,
        ids=jnp.zeros(0, jnp.int32),
        values=jnp.zeros((0, 4096)),
    )
    for mean in (
        trees.weighted_mean(stacked, weights),
        offload.weighted_sum(stacked, weights / clients),
        offload.weighted_sum(offloaded, weights / clients),
    ):
        assert mean.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(mean, np.float64).sum(), expected, rtol=3e-4)


class Stored:
    """A source of rows, as stores have for leaves off the device."""

    def __init__(self, rows: np.ndarray):
        self.rows = rows

    def read(self, leaves: Any, ids: np.ndarray) -> list[np.ndarray]:
        return [self.rows[ids] for _ in leaves]
