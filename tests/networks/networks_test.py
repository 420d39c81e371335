"""Built-in networks: sizes, outputs, initialisation and padding."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import (
    CNN,
    CNN1D,
    MLP,
    DropoutCNN,
    LeNet,
    MobileNet,
    ResNet9,
    SmallCNN,
    norm_layers,
)
from fedjax_pfl.networks.tracing import layers_in_order


def shapes(model, *image):
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *image)))


@pytest.mark.parametrize(
    ("model", "image", "parameters", "layers", "head"),
    [
        (LeNet(), (28, 28, 1), 85_822, "conv1 conv2 fc1 fc2 fc3", "fc3"),
        (
            ResNet9(),
            (32, 32, 3),
            2_574_282 - 2 * 1472,  # BatchNorm's statistics are no parameters
            " ".join(f"conv{i} norm{i}" for i in range(1, 9)) + " fc1",
            "fc1",
        ),
        (CNN(), (28, 28, 1), 2_278_334, "conv1 conv2 fc1 fc2", "fc2"),
        # 3·9·32 + 32, 32·9·64 + 64, 14·14·64·128 + 128, 128·10 + 10
        (DropoutCNN(), (32, 32, 3), 1_626_442, "conv1 conv2 fc1 fc2", "fc2"),
        (MLP(hidden=(5, 4)), (2, 3), 35 + 24 + 50, "fc1 fc2 fc3", "fc3"),
        (SmallCNN(), (8, 8, 1), 9_258, "conv1 conv2 fc1 fc2", "fc2"),
        (SmallCNN(batch_norm=True), (8, 8, 1), 9_354, "conv1 norm1 conv2 norm2 fc1 fc2", "fc2"),
    ],
)
def test_sizes_and_names(model, image, parameters, layers, head):
    variables = shapes(model, *image)
    assert trees.size(variables["params"]) == parameters
    assert set(trees.layers(variables)) == set(layers.split())
    assert model.layers == tuple(layers.split())
    example = jnp.zeros((1, *image))
    assert model.layers == layers_in_order(model.apply, variables, example)
    assert model.head == model.layers[-1] == head
    assert variables["params"][head]["bias"].shape == (model.outputs,)
    assert norm_layers(variables) == {name for name in layers.split() if name.startswith("norm")}


@pytest.mark.slow("a deep network")
@pytest.mark.parametrize(
    ("kind", "classes", "parameters", "norms"),
    [
        ({}, 10, 2_236_682, 52),
        ({"norm": "group"}, 10, 2_236_682, 0),
        ({}, 100, 2_351_972, 52),  # 1281 for each class more
        # torchvision's mobilenet_v2(width_mult=0.5) has 1,968,680 with 1,000 classes.
        ({"width": 0.5}, 10, 1_968_680 - 990 * 1281, 52),
    ],
)
def test_mobilenet_sizes(kind, classes, parameters, norms):
    model = MobileNet(outputs=classes, **kind)
    variables = shapes(model, 32, 32, 3)
    assert trees.size(variables["params"]) == parameters
    assert model.layers == layers_in_order(model.apply, variables, jnp.zeros((1, 32, 32, 3)))
    assert len(norm_layers(variables)) == norms
    assert variables["params"][model.head]["bias"].shape == (classes,)


def test_mobilenet_shapes_and_residuals():
    """32x32 images are reduced to 1x1; ten blocks have a residual connection."""
    shape, blocks = {}, MobileNet()._blocks()

    def note(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if context.method_name == "__call__" and context.module.name:
            shape[context.module.name] = out.shape
        return out

    with nn.intercept_methods(note):
        shapes(MobileNet(), 32, 32, 3)
    assert shape["conv1"] == (1, 16, 16, 32)
    assert shape["project17"] == (*shape["depth17"][:3], 320) == (1, 1, 1, 320)
    assert [shape[f"project{i}"][1] for i in (1, 3, 6, 10, 13, 16)] == [16, 8, 4, 2, 2, 1]
    assert sum(b.stride == 1 and b.inputs == b.outputs for b in blocks) == 10


@pytest.mark.slow("a deep network")
def test_group_norm_is_independent_of_other_examples():
    model = MobileNet(norm="group", width=0.1, dropout=0.0)
    x = jax.random.normal(jax.random.key(0), (3, 8, 8, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    run = jax.jit(lambda x: model.apply(variables, x, train=True))
    np.testing.assert_allclose(run(x)[:1], run(x.at[1:].set(0))[:1], rtol=1e-5, atol=1e-7)


def test_windows_too_short_for_the_poolings_are_refused():
    with pytest.raises(UsageError, match="use windows of 8 steps or more"):
        shapes(CNN1D(kernels=(2, 2, 2)), 7, 3)
    assert trees.size(shapes(CNN1D(kernels=(2, 2, 2)), 8, 3)["params"]) > 0


@pytest.mark.parametrize(("model", "size"), [(SmallCNN(), 3), (DropoutCNN(), 5)])
def test_images_too_small_for_the_poolings_are_refused(model, size):
    with pytest.raises(UsageError, match="leave nothing of examples of this size"):
        shapes(model, size, size, 1)


@pytest.mark.slow("programs of several kernels")
def test_convolutions_over_time_keep_the_length():
    """Kernels of ones sum 2 steps to 3, 6, 12 and 8, and 3 steps to 3, 7, 14 and 12."""
    x = jnp.array([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1)
    for size, mean_of_pooled in ((2, 9.0), (3, 10.5)):
        model = CNN1D(outputs=1, kernels=(1,), kernel_size=size)
        ones = jax.tree.map(jnp.ones_like, model.init(jax.random.key(0), x))
        np.testing.assert_allclose(model.apply(ones, x), [[mean_of_pooled + 2]], rtol=1e-6)


@pytest.mark.slow("a network of many examples")
def test_dropout_cnn_equals_lax():
    """Compares outputs with dropout rates of 0 and 1, and checks the initial weights."""
    model = DropoutCNN(kernels=(2, 3), hidden=4, dropout=(0.25, 0.5))
    x = jax.random.normal(jax.random.key(0), (5, 10, 10, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    params = variables["params"]

    def convolve(x, layer):
        layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "VALID", **layout)
        return jnp.maximum(x + layer["bias"][None, None, None], 0)

    def dense(x, layer):
        return x @ layer["kernel"] + layer["bias"][None]

    @jax.jit
    def expected(rate1, rate2):
        y = convolve(convolve(x, params["conv1"]), params["conv2"])
        y = y.reshape(5, 3, 2, 3, 2, 3).max((2, 4))  # [B, 6, 6, 3], pooled by 2x2
        y = rate1 * y.reshape(5, -1)
        return dense(rate2 * jnp.maximum(dense(y, params["fc1"]), 0), params["fc2"])

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    close(jax.jit(model.apply)(variables, x), expected(1.0, 1.0))
    key, train = {"dropout": jax.random.key(2)}, {"train": True}
    for dropout, scales in (
        ((0.0, 0.0), (1.0, 1.0)),
        ((1.0, 0.0), (0.0, 1.0)),
        ((0.0, 1.0), (1.0, 0.0)),
    ):
        close(
            model.clone(dropout=dropout).apply(variables, x, rngs=key, **train), expected(*scales)
        )
    for name, fans in (("conv1", 9 + 18), ("conv2", 18 + 27), ("fc1", 27 + 4), ("fc2", 4 + 10)):
        kernel = np.abs(params[name]["kernel"])
        bound = np.sqrt(6 / fans)
        assert 0.7 * bound < kernel.max() <= bound


def test_initial_weights_as_in_pytorch():
    params = jax.jit(CNN().init)(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))["params"]
    for layer in params.values():
        fan_in = layer["kernel"][..., 0].size
        bound = 1 / np.sqrt(fan_in)
        for leaf in layer.values():
            leaf = np.asarray(leaf)
            assert np.abs(leaf).max() <= bound
            spread = 4 / np.sqrt(leaf.size)  # at least four standard errors
            assert np.abs(leaf).max() > bound * (1 - spread)
            np.testing.assert_allclose(np.var(leaf), bound**2 / 3, rtol=spread)
            assert abs(np.mean(leaf)) < bound * spread


def step(model, variables, x, mask):
    """Returns the gradient of a loss over real rows, and (outputs, new statistics)."""

    def loss(params):
        out, new = model.apply(
            {**variables, "params": params}, x, train=True, mask=mask, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.where(mask[:, None], jnp.sin(out), 0)), (out, new)

    return jax.grad(loss, has_aux=True)(variables["params"])


@pytest.mark.slow("a gradient of every network")
def test_padding_changes_nothing():
    model = LeNet(kernels=(2, 3), dense=(8,), kernel_size=3, batch_norm=True)
    x = jax.random.normal(jax.random.key(0), (6, 10, 10, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    mask = jnp.arange(6) < 4
    run = jax.jit(lambda x, mask: step(model, variables, x, mask))
    gradient, (out, new) = run(x, mask)
    padded, (out_padded, new_padded) = run(x.at[4:].set(1e3), mask)
    np.testing.assert_array_equal(out[:4], out_padded[:4])
    jax.tree.map(np.testing.assert_array_equal, (gradient, new), (padded, new_padded))

    short, (out_short, new_short) = run(x[:4], jnp.ones(4, bool))

    def close(a, b):  # sums over other numbers of rows differ by 1.4e-6
        return np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)

    jax.tree.map(close, (gradient, out[:4], new), (short, out_short, new_short))
    changed = jax.tree.map(
        lambda a, b: jnp.any(a != b), new["batch_stats"], variables["batch_stats"]
    )
    assert all(jax.tree.leaves(changed))

    all_padding = run(x, jnp.zeros(6, bool))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(all_padding))


def test_batch_norm():
    model = SmallCNN(batch_norm=True)
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    _, new = jax.jit(lambda v, x: model.apply(v, x, train=True, mutable=["batch_stats"]))(
        variables, x
    )
    layer = jax.tree.map(np.asarray, variables["params"]["conv1"])
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(np.asarray(x)[..., 0], ((0, 0), (1, 1), (1, 1))), (3, 3), (1, 2)
    )
    y = np.einsum("bhwij,ijo->bhwo", windows, layer["kernel"][:, :, 0]) + layer["bias"]
    np.testing.assert_allclose(
        new["batch_stats"]["norm1"]["mean"], 0.1 * y.mean((0, 1, 2)), rtol=1e-4, atol=1e-6
    )
    old_var, new_var = (v["batch_stats"]["norm1"]["var"] for v in (variables, new))
    np.testing.assert_allclose(new_var, 0.9 * old_var + 0.1 * y.var((0, 1, 2)), rtol=1e-5)
    # In evaluation neither other examples nor the mask have an effect.
    run = jax.jit(model.apply)
    outputs = run(variables, x, mask=jnp.array([True, False, True, False]))
    np.testing.assert_allclose(outputs[:1], run(variables, x[:1]), rtol=1e-5, atol=1e-6)
