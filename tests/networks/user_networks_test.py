"""Tests of users' networks in the training loop."""

import functools

import chex
import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedjax_pfl as pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks.features import WithFeatures
from fedjax_pfl.networks.normalisation import BatchNorm
from fedjax_pfl.networks.user_defined import check_network
from fedjax_pfl.networks.user_networks import user_network
from fedjax_pfl.settings.configuration import factory_settings
from tests import tiny
from tests.networks.user_defined_test import KEY, Unordered, X, linen, train_step


class Masked(nn.Module):
    """A network with the arguments of the built-in ones, but without names of its layers."""

    @nn.compact
    def __call__(self, x, train, mask):
        return BatchNorm()(nn.Dense(3)(x), train, mask)


class ModernNet(nnx.Module):
    def __init__(self, outputs, *, rngs):
        self.body, self.a = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, outputs, rngs=rngs)

    def __call__(self, x):
        return self.a(nnx.relu(self.body(x)))


@pytest.mark.slow("programs of three networks")
@pytest.mark.parametrize("net", [Unordered(), Masked(), ModernNet])
def test_the_loop_trains_networks_of_ones_own(net):
    """Their personal models, applied to the test examples, have the evaluation's accuracy."""
    data, federation = tiny.federated()
    partitioned = pfl.PartitionedData(data, federation)
    method = pfl.fedper(net, pfl.local_sgd(0.1, epochs=1), federation)
    simulation = pfl.Simulation(method, partitioned)
    state, _ = simulation.run_round(simulation.init(), 0)
    accuracy = simulation.evaluate(state, 1).before.accuracy
    network = pfl.networks.from_flax(net, federation)
    for i in range(2):
        rows = data.test.rows[i][: data.test.size[i]]
        outputs = network.apply(simulation.personal_model(state, i), data.x[rows])
        np.testing.assert_allclose((outputs.argmax(-1) == data.y[rows]).mean(), accuracy[i])


def test_a_network_like_the_built_in_ones_gets_the_mask():
    network = pfl.networks.from_flax(Masked(), tiny.federated()[1])
    variables, mask = network.init(KEY, X), jnp.arange(7) < 4
    with_padding = train_step(network, variables, X, mask)
    without = train_step(network, variables, X[:4], None)
    chex.assert_trees_all_close(with_padding[1], without[1], rtol=1e-6)


def test_networks_that_do_not_fit_the_examples():
    federation = tiny.federated()[1]
    for net, line in (
        (Unordered(4), r"Unordered gives \[2, 4\] for 2 examples, and their task needs \[2, 3\]"),
        (nn.Conv(3, (3, 3)), r"Conv fails for examples \(5,\): "),
        (nn.Dense(3), "Dense is a layer and no network: .* use it in a module"),
        (pfl.networks.LeNet(3), r"LeNet fails for examples \(5,\): "),
        (pfl.networks.MLP(3, 64), r"MLP fails for examples \(5,\): .*int"),
    ):
        with pytest.raises(UsageError, match=line):
            pfl.fedavg(net, pfl.local_sgd(), federation)


class ByKeyword(nn.Module):
    """Passes inputs to its layers by keyword."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train)(x=nn.Dense(4)(inputs=x))
        return nn.Dense(3)(inputs=x)


class OwnKernel(nn.Module):
    """Has a parameter of its own beside its layers."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(x) * self.param("kernel", nn.initializers.ones, (1, 3))


def test_a_network_may_have_a_kernel_of_its_own():
    assert check_network("OwnKernel", linen(OwnKernel()), X[:2]).shape == (2, 3)


class LinenRates(nn.Module):
    rate: float = 0
    rates: tuple[float, ...] = (1, 2)
    width: int = 8


class ModernRates(nnx.Module):
    def __init__(self, rate: float = 0, rates: tuple[float, ...] = (1, 2), width: int = 8, *, rngs):
        pass


@pytest.mark.parametrize("network", [LinenRates, LinenRates(), ModernRates])
def test_integers_may_be_the_defaults_of_real_numbers(network):
    settings = factory_settings(user_network("Rates", network, "0"))
    assert {name: settings[name] for name in ("rate", "rates", "width")} == {
        "rate": 0.0,
        "rates": (1.0, 2.0),
        "width": 8,
    }
    assert [type(number) for number in settings["rates"]] == [float, float]
    assert (type(settings["rate"]), type(settings["width"])) == (float, int)


def test_a_network_whose_types_cannot_be_read_has_the_types_of_its_defaults():
    partial = functools.partial(LinenRates, width=4)
    settings = factory_settings(user_network("Rates", partial, "0"))
    assert (settings["rate"], type(settings["rate"]), settings["width"]) == (0, int, 4)


def test_inputs_of_layers_by_keyword():
    net, mask = linen(ByKeyword()), jnp.arange(7) < 4
    variables = net.init(KEY, X)
    (padded, _), (plain, _) = (
        train_step(net, variables, X, mask),
        train_step(net, variables, X[:4], None),
    )
    np.testing.assert_allclose(padded[:4], plain, rtol=1e-5, atol=1e-6)
    outputs, features = WithFeatures(net).apply(variables, X)
    head = variables["params"][net.head]
    np.testing.assert_allclose(features @ head["kernel"] + head["bias"][None], outputs, rtol=1e-5)
    doubled = WithFeatures(net, lambda z: 2 * z).apply(variables, X)[0]
    np.testing.assert_allclose(
        2 * features @ head["kernel"] + head["bias"][None], doubled, rtol=1e-5
    )
