"""Networks: sizes, how they start, and what padding may not do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import trees
from fedjax_pfl.models import CNN, MLP, LeNet, MobileNet, SmallCNN, norm_layers
from fedjax_pfl.models.init import uniform


def shapes(model, *image):
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *image)))


@pytest.mark.parametrize(
    ("model", "image", "parameters", "layers", "head"),
    [
        (LeNet(), (32, 32, 3), 121_182, "conv1 conv2 fc1 fc2 fc3", "fc3"),
        (LeNet(), (28, 28, 1), 85_822, "conv1 conv2 fc1 fc2 fc3", "fc3"),
        (CNN(), (28, 28, 1), 2_278_334, "conv1 conv2 fc1 fc2", "fc2"),
        (MLP(hidden=(5, 4)), (2, 3), 35 + 24 + 50, "fc1 fc2 fc3", "fc3"),
        (MLP(hidden=()), (6,), 70, "fc1", "fc1"),
        (SmallCNN(), (8, 8, 1), 9_258, "conv1 conv2 fc1 fc2", "fc2"),
        (
            SmallCNN(batch_norm=True),
            (8, 8, 1),
            9_258 + 2 * 48,
            "conv1 norm1 conv2 norm2 fc1 fc2",
            "fc2",
        ),
    ],
)
def test_sizes_and_names(model, image, parameters, layers, head):
    variables = shapes(model, *image)
    assert trees.size(variables["params"]) == parameters
    assert set(trees.layers(variables)) == set(layers.split())
    assert model.layers == tuple(layers.split())
    assert model.head == model.layers[-1] == head
    assert variables["params"][head]["bias"].shape == (model.outputs,)
    assert norm_layers(variables) == {name for name in layers.split() if name.startswith("norm")}


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
    assert set(trees.layers(variables)) == set(model.layers)
    assert len(norm_layers(variables)) == norms
    assert variables["params"][model.head]["bias"].shape == (classes,)


def test_mobilenet_strides_and_residuals():
    """32x32 comes down to 1x1; ten blocks add their input to what they make of it."""
    shape, adds = {}, MobileNet()._blocks()

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
    assert sum(b.stride == 1 and b.inputs == b.outputs for b in adds) == 10


def test_group_norm_does_not_look_at_other_examples():
    model = MobileNet(norm="group", width=0.1, dropout=0.0)
    x = jax.random.normal(jax.random.key(0), (3, 8, 8, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    run = jax.jit(lambda x: model.apply(variables, x, train=True))
    np.testing.assert_allclose(run(x)[:1], run(x.at[1:].set(0))[:1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "model", [LeNet(batch_norm=True), CNN(), SmallCNN(), MLP(hidden=(5, 4)), MobileNet()]
)
def test_layers_are_in_the_order_of_their_calls(model):
    called = []

    def note(call, args, kwargs, context):
        layer = len(context.module.path) == 1 and not isinstance(context.module, nn.Dropout)
        if layer and context.method_name == "__call__":
            called.append(context.module.path[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        shapes(model, 28, 28, 1)
    assert tuple(called) == model.layers


def test_layers_start_as_in_pytorch():
    params = jax.jit(CNN().init)(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))["params"]
    for layer in params.values():
        fan_in = layer["kernel"][..., 0].size
        bound = 1 / np.sqrt(fan_in)
        for leaf in layer.values():
            leaf = np.asarray(leaf)
            assert np.abs(leaf).max() <= bound
            spread = 4 / np.sqrt(leaf.size)  # four standard errors and more
            assert np.abs(leaf).max() > bound * (1 - spread)
            np.testing.assert_allclose(np.var(leaf), bound**2 / 3, rtol=spread)
            assert abs(np.mean(leaf)) < bound * spread


def test_uniform_knows_its_dtype():
    drawn = uniform(4)(jax.random.key(0), (100,), jnp.bfloat16)
    assert drawn.dtype == jnp.bfloat16
    assert float(jnp.abs(drawn).max()) <= 0.5


def step(model, variables, x, mask):
    """Outputs, new statistics and the gradient of a loss over real rows only."""

    def loss(params):
        out, new = model.apply(
            {**variables, "params": params}, x, train=True, mask=mask, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.where(mask[:, None], jnp.sin(out), 0)), (out, new)

    return jax.grad(loss, has_aux=True)(variables["params"])


def test_padding_changes_no_bit():
    model = LeNet(kernels=(2, 3), dense=(8,), kernel_size=3, batch_norm=True)
    x = jax.random.normal(jax.random.key(0), (6, 10, 10, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    mask = jnp.arange(6) < 4
    run = jax.jit(lambda x, mask: step(model, variables, x, mask))
    gradient, (out, new) = run(x, mask)
    other, (out_other, new_other) = run(x.at[4:].set(1e3), mask)
    np.testing.assert_array_equal(out[:4], out_other[:4])
    jax.tree.map(np.testing.assert_array_equal, (gradient, new), (other, new_other))

    less, (out_less, new_less) = run(x[:4], jnp.ones(4, bool))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (gradient, out[:4], new), (less, out_less, new_less))
    changed = jax.tree.map(
        lambda a, b: jnp.any(a != b), new["batch_stats"], variables["batch_stats"]
    )
    assert all(jax.tree.leaves(changed))

    nothing = run(x, jnp.zeros(6, bool))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(nothing))


def test_batch_norm_by_hand():
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
    np.testing.assert_allclose(
        new["batch_stats"]["norm1"]["var"], 0.9 + 0.1 * y.var((0, 1, 2)), rtol=1e-5
    )


def test_evaluation_ignores_batch_and_mask():
    model = SmallCNN(batch_norm=True)
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    run = jax.jit(model.apply)
    whole = run(variables, x, mask=jnp.array([True, False, True, False]))
    np.testing.assert_allclose(whole[:1], run(variables, x[:1]), rtol=1e-5, atol=1e-6)
