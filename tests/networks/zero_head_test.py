"""Networks with a head of zeros."""

import copy
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.factorized import SplitKernels
from fedjax_pfl.networks.pretrained import Pretrained
from fedjax_pfl.networks.zero_head import ZeroHead

KEY = jax.random.key(2)
X = jax.random.normal(KEY, (6, 8, 8, 1))
Y = jnp.array([0, 1, 2, 1, 0, 2])
SMALL = LeNet(outputs=3, kernels=(2, 3), dense=(6,), kernel_size=3, padding="SAME")


@pytest.mark.slow("programs of several networks")
def test_only_the_head_is_zero():
    net = ZeroHead(SMALL)
    variables, expected = net.init(KEY, X), SMALL.init(KEY, X)
    assert (net.head, net.layers, net.outputs) == (SMALL.head, SMALL.layers, 3)
    head = variables["params"].pop("fc2")
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(head))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected["params"].pop("fc2")))
    chex.assert_trees_all_equal(variables, expected)


@pytest.mark.parametrize("wrap", [ZeroHead, lambda net: Pretrained(net, {"a": np.ones(2)})])
def test_wrappers_are_copied_and_pickled(wrap):
    net = wrap(SMALL)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert (type(copied), copied.model, copied.head) == (type(net), SMALL, SMALL.head)


def trained(net, y):
    """Returns the layers below the head after three steps on labels y."""

    def loss(params):
        outputs = net.apply({"params": params}, X)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()

    params = net.init(KEY, X)["params"]
    for _ in range(3):
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss)(params))
    return {name: layer for name, layer in params.items() if name != net.head}


@pytest.mark.slow("several methods' runs")
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: SplitKernels(net, (8, 8, 1))])
def test_lower_layers_do_not_depend_on_the_order_of_labels(wrap):
    permuted = jnp.array([2, 0, 1])[Y]
    net = wrap(ZeroHead(SMALL))
    chex.assert_trees_all_close(trained(net, Y), trained(net, permuted), atol=1e-6)
    first, second = (trained(wrap(SMALL), y) for y in (Y, permuted))
    assert optax.tree.norm(jax.tree.map(jnp.subtract, first, second)) > 1e-2
