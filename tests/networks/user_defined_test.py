"""User-defined networks, linen and NNX: layers, masks, random numbers and errors."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import LSTM, Transformer
from fedjax_pfl.networks.factorized import LAYOUTS, Factorized, Hadamard, SplitKernels
from fedjax_pfl.networks.features import WithFeatures
from fedjax_pfl.networks.tracing import layers_in_order
from fedjax_pfl.networks.user_defined import LinenNetwork, check_network, check_tokens
from fedjax_pfl.networks.user_defined_nnx import NnxNetwork

pytestmark = pytest.mark.slow("programs of many kinds of networks")

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)


class Unordered(nn.Module):
    """Layers that are not in alphabetical order, with the flag `deterministic`."""

    outputs: int = 3

    @nn.compact
    def __call__(self, x, deterministic=True):
        x = nn.Dense(8, name="z")(x)
        x = nn.BatchNorm(use_running_average=deterministic, name="middle")(x)
        x = nn.Dropout(0.5, deterministic=deterministic)(nn.relu(x))
        return nn.Dense(self.outputs, name="a")(x)


class Modern(nnx.Module):
    def __init__(self, *, rngs):
        self.z = nnx.Linear(5, 8, rngs=rngs)
        self.middle = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.a = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.middle(self.z(x))))
        return self.a[1](self.a[0](x))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, is_training):
        return nn.Dense(2)(nn.BatchNorm(not is_training)(nn.Dense(4)(x)))


LINEN = LinenNetwork("Plain", {}, Unordered(), (5,))
NNX = NnxNetwork("Modern", {}, lambda rngs: Modern(rngs=rngs), (5,))


def test_layers_are_in_call_order():
    assert (LINEN.layers, LINEN.head) == (("z", "middle", "a"), "a")
    assert (NNX.layers, NNX.head) == (("z", "middle", "a/0", "a/1"), "a/1")
    for net in (LINEN, NNX):
        variables = net.init(KEY, X[:1])
        assert set(trees.layers(variables)) == set(net.layers)
        assert set(variables) == {"params", "batch_stats"}
        assert check_network("net", net, X[:2]).shape == (2, 3)
    # Built-in networks declare the order that is traced.
    for net, x in ((LSTM(7, 3, (4, 5)), (2, 6)), (Transformer(7, 8, 2, 2), (2, 6))):
        tokens = jnp.zeros(x, jnp.int32)
        shapes = jax.eval_shape(net.init, KEY, tokens)
        assert layers_in_order(net.apply, shapes, tokens) == net.layers


def test_features_are_inputs_of_the_head():
    variables = LINEN.init(KEY, X[:1])
    outputs, z = WithFeatures(LINEN).apply(variables, X)
    expected = X.astype(np.float64) @ variables["params"]["z"]["kernel"] / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(z, np.maximum(expected, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs, LINEN.apply(variables, X))


def train_step(net, variables, x, mask, seed=0):
    """Returns the outputs in training and the new statistics."""
    rngs = {"dropout": jax.random.key(seed)}
    return net.apply(variables, x, train=True, mask=mask, rngs=rngs, mutable=["batch_stats"])


NORMED = LinenNetwork("Normed", {}, Normed(), (5,))  # without dropout


@pytest.mark.parametrize("net", [LINEN, NNX, NORMED])
def test_batch_norm_ignores_padding(net):
    variables = net.init(KEY, X[:1])
    expected_outputs, expected = train_step(net, variables, X[:4], jnp.ones(4, bool))
    padded = np.concatenate([X[:4], np.full((3, 5), 50, np.float32)])
    outputs, stats = train_step(net, variables, padded, jnp.arange(7) < 4)
    assert all((np.abs(leaf) > 1e-4).any() for leaf in jax.tree.leaves(stats))
    chex.assert_trees_all_close(stats, expected, atol=1e-6)
    if net is NORMED:
        np.testing.assert_allclose(outputs[:4], expected_outputs, atol=1e-6)
    # Padding has an effect without the mask, and an empty mask gives finite values.
    _, unmasked = train_step(net, variables, padded, jnp.ones(7, bool))
    differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), unmasked, stats)
    assert max(jax.tree.leaves(differences)) > 0.1
    chex.assert_tree_all_finite(train_step(net, variables, X, jnp.zeros(7, bool)))


@pytest.mark.parametrize("net", [LINEN, NNX])
def test_dropout_depends_on_the_key_and_only_in_training(net):
    variables = net.init(KEY, X[:1])
    first, again, second = (
        train_step(net, variables, X, jnp.ones(7, bool), seed)[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    np.testing.assert_array_equal(net.apply(variables, X), net.apply(variables, X))
    stats = net.apply(variables, X, mutable=["batch_stats"])[1]["batch_stats"]
    chex.assert_trees_all_equal(stats, variables["batch_stats"])


class TokenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(7, 4)(x) + nn.Embed(20, 4)(jnp.arange(x.shape[1]))[None]
        return nn.Dense(7)(x)


class ModernTokens(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.out = nnx.Linear(4, 7, rngs=rngs)

    def __call__(self, x):
        return self.out(self.embed(x))


@pytest.mark.parametrize(
    "net",
    [
        LinenNetwork("Tokens", {}, TokenModel(), (5,), "int32"),
        NnxNetwork("ModernTokens", {}, lambda rngs: ModernTokens(rngs=rngs), (5,), "int32"),
        LSTM(7, 3, (4,)),
        Transformer(7, 8, 1, 2),
    ],
)
def test_tokens_outside_the_vocabulary(net):
    x = np.arange(10, dtype=np.int32).reshape(2, 5) % 7
    assert check_tokens(net, x) is None
    x[1, 2] = 7
    assert check_tokens(net, x) == (7, 7)
    x[0, 3] = -1
    assert check_tokens(net, x) == (3, 7)


class Columns(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(jnp.concatenate([nn.Embed(3, 4)(x[:, 0]), nn.Embed(9, 4)(x[:, 1])], 1))


def test_columns_with_vocabularies_of_their_own():
    net = LinenNetwork("Columns", {}, Columns(), (2,), "int32")
    x = np.array([[0, 8], [2, 4]], np.int32)
    assert np.isfinite(net.apply(net.init(KEY, x), x)).all()
    assert check_tokens(net, x) is None


class AlwaysDrops(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(x))


class Folds(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train)(x.reshape(-1, 1))
        return nn.Dense(3)(x.reshape(-1, 5))


class WithHead(nn.Module):
    head = "nowhere"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class ModernDrops(nnx.Module):
    def __init__(self, *, rngs):
        self.out, self.dropout = nnx.Linear(5, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.out(x), deterministic=False)


class ModernRecurrent(nnx.Module):
    """Its cell takes a random key for the initial state, which is zero."""

    def __init__(self, *, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(2, 4, rngs=rngs))
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rnn(x)[:, -1])


def test_recurrent_nnx_networks():
    net = NnxNetwork("Recurrent", {}, lambda rngs: ModernRecurrent(rngs=rngs), (5, 2))
    x = np.stack([X, X], -1)
    assert check_network("Recurrent", net, x[:2]).shape == (2, 3)
    assert (net.layers[-1], net.head) == ("out", "out")
    variables = net.init(KEY, x[:1])
    rngs = {"dropout": KEY}
    trained = net.apply(variables, x, train=True, mask=jnp.ones(7, bool), rngs=rngs)
    np.testing.assert_allclose(net.apply(variables, x), trained, atol=1e-6)


class ModernCaches(nnx.Module):
    def __init__(self, *, rngs):
        self.out, self.last = nnx.Linear(5, 3, rngs=rngs), nnx.Cache(jnp.zeros(3))

    def __call__(self, x):
        return self.out(x)


def linen(module):
    return LinenNetwork("Net", {}, module, (5,))


def modern(module):
    return NnxNetwork("Net", {}, lambda rngs: module(rngs=rngs), (5,))


@pytest.mark.parametrize(
    ("net", "line"),
    [
        (linen(AlwaysDrops()), "Net draws random numbers when it is evaluated"),
        (
            linen(nn.Sequential([nn.Dense(4), nn.BatchNorm(False)])),
            "Net changes batch_stats when it is evaluated; let its __call__ take train",
        ),
        (linen(Folds()), r"BatchNorm of Net sees \[10, 1\], whose first axis is"),
        (modern(ModernDrops), "Net draws random numbers"),
        (modern(ModernCaches), "Net has last, which is a Ca"),
    ],
)
def test_invalid_networks(net, line):
    with pytest.raises(UsageError, match=line):
        check_network("Net", net, X[:2])


class Reshapes(nn.Module):
    """Returns `outputs` outputs in training and three in evaluation."""

    outputs: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(x) if not train else jnp.tile(nn.Dense(3)(x)[:, :1], self.outputs)


class Remembers(nn.Module):
    """Keeps a variable whose shape becomes [size] in a training step."""

    kind: str
    size: int

    @nn.compact
    def __call__(self, x, train=False):
        last = self.variable(self.kind, "last", lambda: jnp.zeros(3))
        if train:
            last.value = jnp.zeros(self.size)
        return nn.Dense(3)(x)


@pytest.mark.parametrize(
    ("wrong", "line", "fixed"),
    [
        (
            Reshapes(4),
            r"outputs \[2, 4\] when it trains and \[2, 3\] when .*; return one array of the same",
            Reshapes(3),
        ),
        (
            Remembers("batch_stats", 4),
            "changes shapes or types of batch_stats in a training step; update them in place",
            Remembers("batch_stats", 3),
        ),
        (
            Remembers("cache", 3),
            "keeps cache besides its parameters; keep them as batch_stats, or leave them out",
            Remembers("batch_stats", 3),
        ),
        (
            type("Named", (Unordered,), {"layers": ("a", "z")})(),
            "layers names a, z; .* name all of them and no others, or leave layers out",
            type("Named", (Unordered,), {"layers": ("a", "z", "middle")})(),
        ),
        (
            WithHead(),
            "head is 'nowhere'; choose one of its layers Dense_0, or leave head out",
            type("Renamed", (WithHead,), {"head": "Dense_0"})(),
        ),
    ],
)
def test_messages_tell_how_to_fix_a_network(wrong, line, fixed):
    def layers_and_head(module):
        net = linen(module)
        assert check_network("Net", net, X[:2]).shape == (2, 3)
        return net.layers, net.head

    with pytest.raises(UsageError, match=line) as error:
        layers_and_head(wrong)
    assert "\n" not in str(error.value)
    layers, head = layers_and_head(fixed)
    assert getattr(fixed, "layers", layers) == layers
    assert getattr(fixed, "head", head) == head


def test_factors_of_1d_convolutions():
    """A kernel [F, I, O] is treated as [F, 1, I, O]."""
    module = nn.Sequential([nn.Conv(4, (3,)), lambda x: x.sum(1), nn.Dense(2)])
    network = LinenNetwork("conv", {}, module, (6, 3))
    x = np.random.default_rng(1).normal(size=(2, 6, 3)).astype(np.float32)
    for layout in LAYOUTS:
        net = Factorized(network, (6, 3), 2, layout)
        assert net.factorized == ("layers_0", "layers_2")
        params = net.init(KEY, x)["params"]
        kernel = net.model_params(params)["layers_0"]["kernel"]
        np.testing.assert_array_equal(kernel, net.kernel(params["layers_0"], (3, 1, 3, 4))[:, 0])
        assert net.apply({"params": params}, x).shape == (2, 2)
    split = SplitKernels(network, (6, 3))
    expected = network.apply(network.init(KEY, x), x)
    np.testing.assert_allclose(split.apply(split.init(KEY, x), x), expected, atol=1e-5)
    hadamard = Hadamard(network, (6, 3))
    assert hadamard.apply(hadamard.init(KEY, x), x).shape == (2, 2)


def test_lstm():
    """Compares two steps of one layer with NumPy."""
    net = LSTM(outputs=4, embedding=3, hidden=(2,))
    x = np.array([[1, 3]], np.int32)
    params = jax.tree.map(np.asarray, net.init(KEY, x)["params"])
    w, b = params["lstm1"]["kernel"], params["lstm1"]["bias"]
    h, c, expected = np.zeros(2), np.zeros(2), []

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    for token in x[0]:
        z = np.concatenate([params["embed"]["embedding"][token], h]) @ w + b
        i, f, g, o = z.reshape(4, 2)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        expected.append(h @ params["fc1"]["kernel"] + params["fc1"]["bias"])
    np.testing.assert_allclose(net.apply({"params": params}, x)[0], expected, atol=1e-6)


def test_causal_attention():
    net = Transformer(outputs=9, width=8, blocks=2, heads=2)
    x = np.array([[1, 2, 3, 4, 5]], np.int32)
    variables = net.init(KEY, x)
    before = net.apply(variables, x)
    x[0, 3] = 8
    after = net.apply(variables, x)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (np.abs(before - after)[0, 3:].max(-1) > 1e-3).all()
    x[0, 1] = 7  # earlier tokens have an effect
    assert (np.abs(net.apply(variables, x) - after)[0, 1:].max(-1) > 1e-4).all()
