"""The fused block of convolution, bias, ReLU and pooling, compared with XLA's convolution.

Without a GPU the kernels run as JAX operations; on a GPU they are compiled.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import CNN, DropoutCNN, LeNet, SmallCNN
from fedjax_pfl.networks.lowerings import fused
from fedjax_pfl.networks.lowerings.conv import max_pool

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
    pytest.mark.slow("two programs for each network"),
]
INTERPRET = jax.default_backend() != "gpu"
LAYOUT = ("NHWC", "HWIO", "NHWC")
CASES = {  # images and kernels of one client
    "lenet1": ((3, 12, 12, 3), (5, 5, 3, 16)),
    "lenet2": ((5, 14, 14, 16), (5, 5, 16, 32)),
    "odd": ((3, 9, 12, 1), (3, 3, 1, 6)),
    "odd outputs": ((2, 8, 9, 6), (5, 5, 6, 16)),
    "uneven": ((2, 7, 10, 16), (2, 3, 16, 6)),
    "narrow": ((1, 6, 6, 32), (3, 3, 32, 3)),
    "many pixels": ((11, 22, 22, 1), (3, 3, 1, 6)),  # more than one sum over pixels
    "one pixel": ((1, 6, 6, 3), (5, 5, 3, 6)),
    "64 outputs": ((2, 8, 8, 32), (5, 5, 32, 64)),
}
fused_block = partial(fused.conv_relu_pool, interpret=INTERPRET)


def plain_block(x, kernel, bias):
    y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=LAYOUT)
    return nn.relu(max_pool(y + bias[None, None, None], (2, 2)))


def values_and_gradients(block, *arguments):
    """Returns outputs and gradients of every client; `arguments` have an axis of clients."""

    def run(x, kernel, bias):
        y, backward = jax.vjp(block, x, kernel, bias)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return y, *backward(weights.astype(y.dtype))

    return jax.jit(jax.vmap(run))(*arguments)


def random_arguments(image, kernel, clients=3):
    shapes = [(clients, *shape) for shape in (image, kernel, kernel[3:])]
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_equals_xla_for_each_client(case):
    arguments = random_arguments(*CASES[case])
    actual = values_and_gradients(fused_block, *arguments)
    expected = values_and_gradients(plain_block, *arguments)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_equal_maxima_and_zeros_have_the_gradient_of_the_plain_form():
    """Sums of small integers are exact, so equal maxima are frequent and results are equal."""
    image, kernel = (2, 9, 8, 3), (3, 3, 3, 6)
    keys = jax.random.split(jax.random.key(1), 3)
    arguments = [
        jax.random.randint(key, (3, *shape), -1, 2).astype(jnp.float32)
        for key, shape in zip(keys, (image, kernel, kernel[3:]), strict=True)
    ]
    y = jax.vmap(plain_block)(*arguments)
    assert float(jnp.mean(y == 0)) > 0.05
    conv = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="VALID")
    pixels = jax.vmap(partial(conv, dimension_numbers=LAYOUT))(*arguments[:2])[:, :, :6, :6]
    windows = pixels.reshape(3, 2, 3, 2, 3, 2, 6)
    maxima = jnp.sum(windows == windows.max((3, 5), keepdims=True), (3, 5))
    assert float(jnp.mean(maxima > 1)) > 0.1

    def run(block):
        def gradients(x, kernel, bias):
            y, backward = jax.vjp(block, x, kernel, bias)
            return y, *backward(jnp.round(3 * jnp.cos(y + jnp.arange(6.0)[None, None, None])))

        return jax.jit(jax.vmap(gradients))(*arguments)

    for actual, expected in zip(run(fused_block), run(plain_block), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("pixel", [0, 11, 132, 143])
def test_not_a_number_is_not_hidden(pixel):
    """A corner of the image belongs to one of the four outputs of a pooling window."""
    x, kernel, bias = (a[0] for a in random_arguments((1, 12, 12, 1), (3, 3, 1, 6), clients=1))
    x = x.at[0, pixel // 12, pixel % 12, 0].set(jnp.nan)
    actual, expected = fused_block(x, kernel, bias), plain_block(x, kernel, bias)
    assert 0 < int(jnp.isnan(expected).sum()) < expected.size
    np.testing.assert_array_equal(jnp.isnan(actual), jnp.isnan(expected))


def test_bfloat16_accumulates_in_float32():
    arguments = random_arguments(*CASES["odd outputs"])
    narrow = [array.astype(jnp.bfloat16) for array in arguments]
    wide = [array.astype(jnp.float32) for array in narrow]
    actual = values_and_gradients(fused_block, *narrow)[0]
    expected = values_and_gradients(plain_block, *wide)[0]
    assert actual.dtype == jnp.bfloat16
    # The convolution and the sum with the bias are rounded, with relative errors of 2^-9 each.
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, rtol=2**-8, atol=2**-8 * scale)


@pytest.mark.parametrize("case", CASES)
def test_triton_has_every_operation(case):
    """Lowers for CUDA, which needs no card."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in random_arguments(*CASES[case])]
    gradient = jax.grad(
        lambda *arguments: jnp.sum(fused.conv_relu_pool(*arguments)), argnums=(0, 1, 2)
    )
    card = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"
    )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=card)):
        traced = jax.jit(jax.vmap(gradient)).trace(*shapes)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(fused, "require", lambda *shapes: None)
    monkeypatch.setattr(fused, "conv_relu_pool", fused_block)


@pytest.mark.parametrize(
    ("network", "image"), [(LeNet(dense=(8,)), (20, 20, 3)), (SmallCNN(dense=(8,)), (9, 8, 1))]
)
def test_networks_have_the_same_parameters_and_outputs(network, image, interpreted):
    x = jax.random.normal(jax.random.key(1), (3, *image))
    results = {}
    for name in ("fused", "xla"):
        model = network.clone(conv=name)
        variables = jax.jit(model.init)(jax.random.key(0), x)
        results[name] = variables, jax.jit(model.apply)(variables, x)
    (actual, y), (expected, y_plain) = results["fused"], results["xla"]
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    np.testing.assert_allclose(y, y_plain, rtol=1e-5, atol=1e-5)


def test_refused_networks_shapes_and_derivatives(monkeypatch):
    def message(network, *image):
        with pytest.raises(UsageError) as error:
            jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, *image)))
        return str(error.value)

    monkeypatch.setattr(fused.jax, "default_backend", lambda: "cpu")
    assert "needs a GPU, and this is a cpu" in message(LeNet(conv="fused"), 28, 28, 1)
    monkeypatch.setattr(fused.jax, "default_backend", lambda: "gpu")
    assert "lenet, cnn and small" in message(DropoutCNN(conv="fused"), 28, 28, 1)
    assert "lenet, cnn and small" in message(LeNet(conv="fused", batch_norm=True), 28, 28, 1)
    assert "at most 128 channels, got 256" in message(CNN(conv="fused", kernels=(256,)), 28, 28, 1)
    assert "does not fit an image of (5, 9)" in message(LeNet(conv="fused"), 5, 9, 1)
    jax.eval_shape(LeNet(conv="fused").init, jax.random.key(0), jnp.zeros((1, 28, 28, 1)))
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    assert "needs the Triton backend of Pallas" in message(LeNet(conv="fused"), 28, 28, 1)
    monkeypatch.undo()

    x, kernel, bias = (array[0] for array in random_arguments(*CASES["one pixel"], clients=1))
    slope = jax.grad(lambda kernel: jnp.sum(fused_block(x, kernel, bias)))
    with pytest.raises(UsageError, match="no second derivatives"):
        jax.grad(lambda kernel: jnp.sum(slope(kernel) ** 2))(kernel)
