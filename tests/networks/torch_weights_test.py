"""Weights of PyTorch networks, against forward passes in NumPy with channels first."""

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import load_file, save_file

from fedjax_pfl import networks
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import torch_weights
from fedjax_pfl.networks.user_defined import LinenNetwork

RNG = np.random.default_rng(0)
SHAPE = (5, 6, 2)


class Layers:
    """Layers of PyTorch with the weights of a `state_dict`, by their names in it."""

    def __init__(self, state):
        self.state = {name: array.astype(np.float64) for name, array in state.items()}

    def conv(self, x, name, stride=1, padding=0):
        weight = self.state[f"{name}.weight"]
        x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        windows = sliding_window_view(x, weight.shape[2:], (2, 3))[:, :, ::stride, ::stride]
        bias = self.state.get(f"{name}.bias", np.zeros(len(weight)))
        return np.einsum("nchwij,ocij->nohw", windows, weight) + bias[:, None, None]

    def linear(self, x, name):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def norm(self, x, name):
        scale, shift, mean, var = (
            self.state[f"{name}.{leaf}"][:, None, None]
            for leaf in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / np.sqrt(var + 1e-5) * scale + shift


def relu(x):
    return np.maximum(x, 0)


def pool(x):
    return sliding_window_view(x, (2, 2), (2, 3))[:, :, ::2, ::2].max((4, 5))


def lenet(layers, x):
    for i in (1, 2):
        x = relu(pool(layers.norm(layers.conv(x, f"conv{i}"), f"norm{i}")))
    x = relu(layers.linear(x.reshape(len(x), -1), "fc1"))
    return layers.linear(relu(layers.linear(x, "fc2")), "fc3")


def cnn(layers, x):
    for i in (1, 2):
        x = pool(relu(layers.conv(x, f"conv{i}")))
    return layers.linear(relu(layers.linear(x.reshape(len(x), -1), "fc1")), "fc2")


def mlp(layers, x):
    return layers.linear(relu(layers.linear(x.reshape(len(x), -1), "fc1")), "fc2")


def resnet9(layers, x):
    def block(x, i, stride=1, padding=1):
        return relu(layers.norm(layers.conv(x, f"conv{i}", stride, padding), f"norm{i}"))

    x = block(block(x, 1), 2, stride=2, padding=2)
    x = pool(block(x + block(block(x, 3), 4), 5))
    x = block(x + block(block(x, 6), 7), 8, padding=0)
    return layers.linear(x.max((2, 3)), "fc1")


LENET = networks.LeNet(outputs=5, kernels=(4, 6), dense=(7, 9), kernel_size=3, batch_norm=True)
CNN = networks.CNN(outputs=5, kernels=(3, 4), dense=(8,))
CASES = {
    "lenet": (lenet, LENET, (14, 12, 3)),
    "cnn": (cnn, CNN, (20, 24, 1)),
    "mlp": (mlp, networks.MLP(outputs=5, hidden=(6,)), (4, 5, 3)),
    "resnet9": (resnet9, networks.ResNet9(outputs=5, width=3), (16, 18, 3)),
}


def random_variables(network, shape):
    """Returns variables in which every entry is random, and variances are positive."""
    variables = network.init(jax.random.key(0), np.zeros((1, *shape), np.float32))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            RNG.uniform(0.5, 1.5, leaf.shape)
            if path[-1].key == "var"
            else RNG.normal(size=leaf.shape) / np.sqrt(max(leaf[..., 0].size, 1))
        ).astype(np.float32),
        variables,
    )


def assert_equal_bits(first, second):
    first, second = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (first, second))
    assert first.keys() == second.keys()
    for path in first:
        assert first[path].dtype == second[path].dtype
        assert first[path].shape == second[path].shape
        assert np.asarray(first[path]).tobytes() == np.asarray(second[path]).tobytes()


def quick_and_slow(quick: set[str]) -> Any:
    """Parametrises by all cases; all but the quick ones are slow."""
    slow = pytest.mark.slow("a larger network of the same kinds of layers")
    return pytest.mark.parametrize(
        "name", [name if name in quick else pytest.param(name, marks=slow) for name in CASES]
    )


@quick_and_slow({"mlp"})
def test_weights_give_the_outputs_of_pytorchs_layout_and_come_back_bit_for_bit(name, tmp_path):
    forward, network, shape = CASES[name]
    variables = random_variables(network, shape)
    torch_weights.to_torch(tmp_path / "w", network, variables, shape)
    state = load_file(tmp_path / "w")
    x = RNG.normal(size=(3, *shape)).astype(np.float32)
    expected = forward(Layers(state), np.moveaxis(x, -1, 1).astype(np.float64))
    imported = torch_weights.from_torch(tmp_path / "w", network, shape)
    np.testing.assert_allclose(network.apply(imported, x), expected, rtol=1e-5, atol=1e-5)
    assert np.ptp(expected) > 0.1
    assert_equal_bits(imported, variables)
    # The same network with other names, and PyTorch's counts of batches.
    renamed = {f"net.{name.replace('.', '.0.', 1)}": array for name, array in state.items()}
    counts = {f"net.norm{i}.num_batches_tracked": np.array(7) for i in (1, 2)}
    save_file({**renamed, **counts}, tmp_path / "theirs")
    assert_equal_bits(torch_weights.from_torch(tmp_path / "theirs", network, shape), variables)
    torch_weights.to_torch(tmp_path / "w2", network, variables, shape, like=tmp_path / "theirs")
    assert_equal_bits(load_file(tmp_path / "w2"), renamed)


class SecondFirst(nn.Module):
    """Calls its layers, of equal shapes, in another order than that of their numbers."""

    def setup(self):
        self.fc1, self.fc2 = nn.Dense(4), nn.Dense(4)

    def __call__(self, x, train=False):
        return self.fc1(nn.relu(self.fc2(x)))


MOBILENET = networks.MobileNet(outputs=3, width=0.25)


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (SecondFirst(), (4,)),
        pytest.param(MOBILENET, (8, 8, 3), marks=pytest.mark.slow("105 layers")),
    ],
)
def test_the_names_that_to_torch_writes_are_matched_exactly(network, shape, tmp_path):
    variables = random_variables(network, shape)
    torch_weights.to_torch(tmp_path / "w", network, variables, shape)
    assert_equal_bits(torch_weights.from_torch(tmp_path / "w", network, shape), variables)
    torch_weights.to_torch(tmp_path / "w2", network, variables, shape, like=tmp_path / "w")
    assert_equal_bits(load_file(tmp_path / "w2"), load_file(tmp_path / "w"))


def test_given_layers_take_precedence_over_equal_names(tmp_path):
    variables = random_variables(SecondFirst(), (4,))
    torch_weights.to_torch(tmp_path / "w", SecondFirst(), variables, (4,))
    layers = ["fc1", "fc2"]
    swapped = torch_weights.from_torch(tmp_path / "w", SecondFirst(), (4,), layers=layers)
    fc1, fc2 = variables["params"]["fc1"], variables["params"]["fc2"]
    assert_equal_bits(swapped, {"params": {"fc1": fc2, "fc2": fc1}})


def test_a_file_whose_order_is_ambiguous_is_read_once_its_layers_are_renamed(tmp_path):
    """Follows both remedies of the error."""
    network, shape = networks.MLP(outputs=4, hidden=(4,)), (4,)
    state = torch_weights.state_dict(network, variables := random_variables(network, shape), shape)
    names = {"fc1": "b", "fc2": "a"}
    renamed = {f"{names[name[:3]]}{name[3:]}": array for name, array in state.items()}
    save_file(renamed, tmp_path / "theirs")
    with pytest.raises(UsageError, match="fc1 can be a or b"):
        torch_weights.from_torch(tmp_path / "theirs", network, shape)
    save_file(state, tmp_path / "renamed")
    start = torch_weights.from_torch(tmp_path / "theirs", network, shape, layers=["b", "a"])
    torch_weights.to_torch(tmp_path / "converted", network, start, shape)
    for file in ("renamed", "converted"):
        assert_equal_bits(torch_weights.from_torch(tmp_path / file, network, shape), variables)


PFLLIB = {"conv1.0": "conv1", "conv2.0": "conv2", "fc": "fc2", "fc1.0": "fc1"}
FL_BENCH = {"base.conv1": "conv1", "base.conv2": "conv2", "base.fc1": "fc1", "classifier": "fc2"}


@pytest.mark.slow("imports of two projects")
@pytest.mark.parametrize("names", [PFLLIB, FL_BENCH])
def test_names_of_other_projects(names, tmp_path):
    shape, theirs = (20, 24, 1), tmp_path / "theirs"
    state = torch_weights.state_dict(CNN, variables := random_variables(CNN, shape), shape)
    leaves = [(name, layer, leaf) for name, layer in names.items() for leaf in ("weight", "bias")]
    save_file({f"{name}.{leaf}": state[f"{layer}.{leaf}"] for name, layer, leaf in leaves}, theirs)
    assert_equal_bits(torch_weights.from_torch(theirs, CNN, shape), variables)


def test_layers_that_do_not_match_are_refused(tmp_path):
    network, shape, path = networks.MLP(outputs=4, hidden=(4, 4)), (4,), tmp_path / "w"
    state = torch_weights.state_dict(network, variables := random_variables(network, shape), shape)
    weight = state.pop("fc3.weight")

    def message(changes, network=network, shape=shape, **options):
        save_file({**state, **changes}, path)
        with pytest.raises(UsageError) as error:
            torch_weights.from_torch(path, network, shape, **options)
        assert "\n" not in str(error.value)
        return str(error.value).removeprefix(f"{path}").removesuffix(f"; {torch_weights._REMEDY}")

    assert message({"fc3.weight": weight[:3]}) == (
        ": fc3 needs weight [4, 4], bias [4], and the file's fc3 has weight [3, 4], bias [4]"
    )
    assert message({}) == (
        ": fc3 needs weight [4, 4], bias [4], and the file has no layer of this kind left"
    )
    (extra,) = ({"fc3.weight": weight, "fc4.weight": weight},)
    assert message(extra) == " also has fc4 with weight [4, 4], which has no layer here"
    assert "fc3.gain [4] belongs to no convolution" in message({"fc3.gain": weight[0]})
    assert "has the dtype int64" in message({"fc3.weight": weight.astype(int)})
    assert "does not take examples of shape [4, 4]" in message({}, CNN, (4, 4))
    transformer = networks.Transformer(outputs=4)
    assert "does not take examples" in message({}, transformer, (4,))
    # Names whose order no number tells are matched with `layers` only.
    renamed = {
        f"{name}.{k}": state.pop(f"fc{i}.{k}")
        for name, i in (("b", 1), ("a", 2))
        for k in ("weight", "bias")
    }
    renamed["fc3.weight"] = weight
    assert message(renamed) == (
        ": fc1 can be a or b, which have equal shapes; rename all layers in the file to the "
        "network's names, such as fc1, or read it with from_torch(..., layers=...), which says "
        "their order, and save the variables with to_torch"
    )
    assert " has the layers a, b, fc3; " in message(renamed, layers=["a", "b"])
    given = torch_weights.from_torch(path, network, shape, layers=["b", "a", "fc3"])
    assert_equal_bits(given, variables)


@pytest.mark.slow("programs of two networks")
def test_a_network_starts_with_given_variables(tmp_path):
    _, network, shape = CASES["lenet"]
    variables = random_variables(network, shape)
    pretrained = networks.Pretrained(network, variables)
    x = np.zeros((1, *shape), np.float32)
    assert_equal_bits(jax.jit(pretrained.init)(jax.random.key(1), x), variables)
    assert (pretrained.head, pretrained.layers) == ("fc3", network.layers)
    with pytest.raises(UsageError, match="do not have the names, shapes and dtypes"):
        networks.Pretrained(network.clone(outputs=6), variables).init(jax.random.key(1), x)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda layers: layers.pop("fc2"),
            "the variables have no fc2.bias; give",
        ),
        (
            lambda layers: layers["fc1"].update(bias=np.zeros(7)),
            r"fc1.bias is \[7\] .* \[200\]",
        ),
    ],
)
def test_variables_of_another_network_are_refused(change, line):
    variables = jax.device_get(random_variables(networks.MLP(), (4,)))
    change(variables["params"])
    with pytest.raises(UsageError, match=line):
        torch_weights.state_dict(networks.MLP(), variables, (4,))


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path):
    path = tmp_path / "w"
    header = json.dumps({"a.weight": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]}})
    float8 = len(header).to_bytes(8, "little") + header.encode() + bytes(2)
    for content, line in (
        (b"\x05", "cannot be read: Error while deserializing"),
        (float8, "an array of type 'F8_E5M2', which NumPy lacks; save it as float32"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=f"^{path} .*{line}"):
            torch_weights.from_torch(path, networks.MLP(), (4,))
    path.unlink()
    with pytest.raises(UsageError, match="No such file"):
        torch_weights.from_torch(path, networks.MLP(), (4,))
    variables = random_variables(networks.MLP(), (4,))
    with pytest.raises(UsageError, match=r"w cannot be written \(No such file or directory\)"):
        torch_weights.to_torch(tmp_path / "missing" / "w", networks.MLP(), variables, (4,))


class OwnNet(nn.Module):
    """Reads a flattened image with a norm and a dense layer, and one that was transposed."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Conv(4, (3, 3), padding="VALID", name="z")(x))
        y = nn.BatchNorm(not train, name="norm")(x.reshape(len(x), -1))
        y = nn.relu(nn.Dense(8, name="b")(y))
        y = nn.Dense(4, name="a")(y) + nn.Dense(4, name="mean")(x.mean((1, 2)))
        channels_first = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        both = jnp.concatenate([x, 2 * x], -1).mean((1, 2))
        return y + nn.Dense(4, name="first")(channels_first) + nn.Dense(4, name="both")(both)


def own_net(layers, x):
    x = relu(layers.conv(x, "z"))
    flat, mean = x.reshape(len(x), -1), x.mean((2, 3))
    y = layers.norm(flat[:, :, None, None], "norm")[:, :, 0, 0]
    y = layers.linear(relu(layers.linear(y, "b")), "a") + layers.linear(mean, "mean")
    both = np.concatenate([mean, 2 * mean], -1)
    return y + layers.linear(flat, "first") + layers.linear(both, "both")


@pytest.mark.slow("programs of two networks")
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: LinenNetwork("Own", {}, net, SHAPE)])
def test_layers_that_read_a_flattened_image_are_reordered(wrap):
    network = wrap(OwnNet())
    state = torch_weights.state_dict(network, variables := random_variables(network, SHAPE), SHAPE)
    x = RNG.normal(size=(3, *SHAPE)).astype(np.float32)
    expected = own_net(Layers(state), np.moveaxis(x, -1, 1).astype(np.float64))
    np.testing.assert_allclose(network.apply(variables, x), expected, rtol=1e-5, atol=1e-5)
    assert np.ptp(expected) > 0.1


class Series(nn.Module):
    """Reads each of five steps with one dense layer, and all of them with another."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(4, name="steps")(x))
        return nn.Dense(3, name="all")((x + nn.Dense(4, name="more")(x)).reshape(len(x), -1))


def test_a_network_that_joins_flattened_images_is_refused_unless_channels_come_first():
    class Branches(nn.Module):
        permutation: tuple[int, ...]

        @nn.compact
        def __call__(self, x, train=False):
            images = [nn.Conv(n, (1, 1), name=f"conv{n}")(x) for n in (3, 4)]
            flat = [y.transpose(self.permutation).reshape(len(y), -1) for y in images]
            return nn.Dense(2, name="fc")(jnp.concatenate(flat, -1))

    with pytest.raises(UsageError, match=r"^fc reads images through concatenate, "):
        torch_weights.check_layers(Branches((0, 1, 2, 3)), SHAPE)
    network = Branches((0, 3, 1, 2))
    variables = random_variables(network, SHAPE)
    layers = Layers(torch_weights.state_dict(network, variables, SHAPE))
    x = RNG.normal(size=(3, *SHAPE)).astype(np.float32)
    images = [layers.conv(np.moveaxis(x, -1, 1).astype(np.float64), f"conv{n}") for n in (3, 4)]
    expected = layers.linear(np.concatenate([y.reshape(3, -1) for y in images], -1), "fc")
    np.testing.assert_allclose(network.apply(variables, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow("programs of two networks")
def test_flattened_outputs_of_a_dense_layer_keep_their_order():
    """PyTorch's dense layers write the last axis too."""
    variables = random_variables(Series(), (5, 6))
    layers = Layers(torch_weights.state_dict(Series(), variables, (5, 6)))
    x = RNG.normal(size=(3, 5, 6)).astype(np.float32)
    steps = relu(layers.linear(x, "steps"))
    expected = layers.linear((steps + layers.linear(steps, "more")).reshape(3, -1), "all")
    np.testing.assert_allclose(Series().apply(variables, x), expected, rtol=1e-5, atol=1e-5)


def test_transposed_convolutions_are_refused():
    network = nn.Sequential([nn.ConvTranspose(3, (2, 2), (2, 2)), nn.Conv(3, (2, 2))])
    with pytest.raises(UsageError, match=r"^layers_0 is a transposed convolution"):
        torch_weights.check_layers(network, (4, 4, 3))


def test_dense_layers_over_several_axes_are_refused():
    network = nn.Sequential([nn.Conv(3, (2,)), nn.DenseGeneral(4, axis=(1, 2), use_bias=False)])
    with pytest.raises(UsageError, match=r"^layers_1 is a product with a kernel of 3 axes"):
        torch_weights.check_layers(network, (5, 3))


def test_layers_of_a_module_without_names_of_its_layers():
    """The field `layers` of Sequential has modules."""
    network = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    variables = random_variables(network, (3,))
    state = torch_weights.state_dict(network, variables, (3,))
    x = RNG.normal(size=(5, 3)).astype(np.float32)
    layers = Layers(state)
    expected = layers.linear(relu(layers.linear(x, "layers_0")), "layers_2")
    np.testing.assert_allclose(network.apply(variables, x), expected, rtol=1e-5, atol=1e-6)
