"""Lowerings and pooling, compared with XLA."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.lowerings import conv
from fedjax_pfl.networks.lowerings.conv import lowering, max_pool

pytestmark = pytest.mark.slow("programs for each lowering")

PRODUCTS = ("patches", "rows", "blocks", "winograd")
LAYOUT = ("NHWC", "HWIO", "NHWC")
CASES = {
    "lenet1": ((2, 12, 12, 3), (5, 5, 3, 4), (1, 1), "VALID"),
    "odd": ((2, 9, 8, 2), (3, 3, 2, 3), (1, 1), "SAME"),
    "stride": ((2, 9, 10, 2), (5, 5, 2, 3), (2, 2), ((2, 2), (2, 2))),
    "uneven": ((1, 10, 7, 2), (3, 2, 2, 3), (2, 3), ((0, 1), (2, 0))),
    "stride same": ((2, 8, 8, 2), (3, 3, 2, 3), (2, 2), "SAME"),
    "crop": ((2, 9, 9, 2), (3, 3, 2, 2), (1, 1), ((-1, 0), (1, -2))),
    "one": ((2, 5, 4, 3), (1, 1, 3, 2), (1, 1), "VALID"),
    "whole": ((2, 4, 4, 3), (4, 4, 3, 2), (1, 1), "VALID"),
}


def random(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def value_and_gradient(name, x, k, strides, padding):
    apply = lowering(name)

    def loss(x, k):
        y = apply(x, k, strides, padding, dimension_numbers=LAYOUT)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(weights * y * y), y

    (_, y), gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, k)
    return y, *gradient


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("case", CASES)
def test_lowerings_equal_xla(case):
    image, kernel, strides, padding = CASES[case]
    x, k = random(0, image), random(1, kernel)

    @jax.jit
    def run(x, k):
        return [value_and_gradient(name, x, k, strides, padding) for name in ("xla", *PRODUCTS)]

    expected, *actual = run(x, k)
    for result in actual:
        close(result, expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_lowerings_with_a_kernel_per_client(name):
    """Clients are spread by vmap, by a loop and over devices."""
    image, kernel, strides, padding = CASES["lenet1"]
    x, k = random(0, (4, *image)), random(1, (4, *kernel))

    def per_client(x, k, name=name):
        return value_and_gradient(name, x, k, strides, padding)

    axis, auto = jax.P("clients"), (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("clients",), auto, devices=jax.devices()[:2])
    vmapped = jax.vmap(per_client)
    specs = {"in_specs": axis, "out_specs": axis, "check_vma": False}
    results = [per_client(x[i], k[i], "xla") for i in range(4)]
    expected = [jnp.stack(parts) for parts in zip(*results, strict=True)]
    for run in (
        vmapped,
        lambda x, k: lax.map(lambda pair: per_client(*pair), (x, k)),
        jax.shard_map(vmapped, mesh=mesh, **specs),
    ):
        close(jax.jit(run)(x, k), expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_second_derivatives_in_a_loop(name):
    image, kernel, strides, padding = CASES["odd"]
    x, k = random(0, image), 0.1 * random(1, kernel)

    @partial(jax.jit, static_argnums=0)
    def run(name):
        slope = jax.grad(lambda k: jnp.sum(value_and_gradient(name, x, k, strides, padding)[2]))
        return lax.fori_loop(0, 3, lambda i, k: k - 1e-3 * slope(k), k)

    close([run(name)], [run("xla")])


@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_accumulates_in_float32(name):
    image, kernel, strides, padding = CASES["lenet1"]
    x, k = random(0, image, jnp.bfloat16), random(1, kernel, jnp.bfloat16)

    def apply(x, k):
        return lowering(name)(x, k, strides, padding, dimension_numbers=LAYOUT)

    @jax.jit
    def run(x, k):
        y, backward = jax.vjp(apply, x, k)
        return y, backward(y)

    actual, gradients = run(x, k)
    wide, wide_gradients = run(x.astype(jnp.float32), k.astype(jnp.float32))
    assert actual.dtype == jnp.bfloat16
    # Rounding to bfloat16 has a relative error of 2^-8; float32 sums differ by 2e-5.
    np.testing.assert_allclose(actual.astype(jnp.float32), wide, rtol=2**-8, atol=1e-3)
    for gradient, exact in zip(gradients, wide_gradients, strict=True):
        assert gradient.dtype == jnp.bfloat16
        scale = 2**-6 * float(jnp.abs(exact).max())
        np.testing.assert_allclose(gradient.astype(jnp.float32), exact, rtol=2**-6, atol=scale)


@pytest.mark.parametrize(
    ("backend", "kernel", "strides", "name"),
    [
        ("cpu", (3, 3, 16, 32), (1, 1), "winograd"),
        ("cpu", (5, 5, 16, 16), (2, 2), "winograd"),
        ("cpu", (5, 5, 32, 8), (1, 1), "blocks"),
        ("cpu", (3, 3, 1, 16), (1, 1), "blocks"),
        ("cpu", (3, 3, 16, 8), (1, 1), "patches"),
        ("cpu", (3, 3, 16, 16), (2, 2), "patches"),
        ("cpu", (1, 1, 16, 16), (1, 1), "patches"),
        ("gpu", (5, 5, 16, 32), (1, 1), "blocks"),
        ("gpu", (5, 5, 64, 128), (1, 1), "patches"),
        ("gpu", (5, 5, 16, 16), (2, 2), "patches"),
        ("gpu", (3, 3, 16, 16), (1, 1), "patches"),
        ("tpu", (5, 5, 3, 16), (1, 1), "patches"),
    ],
)
def test_automatic_choice(backend, kernel, strides, name, monkeypatch):
    monkeypatch.setattr(conv.jax, "default_backend", lambda: backend)
    assert conv._auto(kernel, strides) == name


def test_automatic_choice_and_fallback_of_winograd_in_programs():
    """Strides without a fast form of winograd use `patches`."""
    x = jnp.ones((1, 9, 9, 3))

    def program(name, side, strides=(1, 1)):
        k = jnp.ones((side, side, 3, 16))

        def apply():
            return lowering(name)(x, k, strides, "VALID", dimension_numbers=LAYOUT)

        return str(jax.make_jaxpr(apply)())

    for side, name in ((5, "blocks"), (3, "patches")):
        assert program("auto", side) == program(name, side)
        assert len({program(n, side) for n in ("xla", *PRODUCTS)}) == 5
    assert program("winograd", 5, (2, 2)) != program("patches", 5, (2, 2))
    assert program("winograd", 3, (2, 2)) == program("patches", 3, (2, 2))


def test_unsupported_convolutions():
    with pytest.raises(UsageError, match="choose from auto, xla"):
        lowering("fft")
    x, k = jnp.ones((1, 6, 6, 4)), jnp.ones((3, 3, 2, 4))
    square, large = jnp.ones((3, 3, 4, 4)), jnp.ones((7, 7, 4, 4))
    layout = {"dimension_numbers": LAYOUT}
    for kernel, padding, settings, message in (
        (k, "SAME", {**layout, "feature_group_count": 2}, "does not do groups"),
        (square, "SAME", {**layout, "rhs_dilation": (2, 2)}, "does not do dilation"),
        (square, "SAME", {}, "layouts"),
        (large, "VALID", layout, "does not fit"),
    ):
        with pytest.raises(UsageError, match=message):
            lowering("patches")(x, kernel, (1, 1), padding, **settings)
    grouped = lowering("auto")(
        x, k, (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=2
    )
    assert grouped.shape == (1, 6, 6, 4)


@pytest.mark.parametrize("name", [*PRODUCTS, "xla"])
def test_per_client_kernels_make_no_grouped_convolution(name):
    model = LeNet(kernels=(2, 4), dense=(8,), conv=name)
    x = jax.ShapeDtypeStruct((3, 2, 20, 20, 1), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    params = jax.eval_shape(jax.vmap(model.init), keys, x)
    gradient = jax.vmap(jax.grad(lambda p, x: jnp.sum(model.apply(p, x))))
    program = jax.jit(gradient).lower(params, x).as_text("hlo")
    assert (" convolution(" in program) == (name == "xla")
    assert ("feature_group_count=3" in program) == (name == "xla")


@pytest.mark.parametrize(
    ("shape", "window", "strides"),
    [((2, 9, 6, 3), (3, 2), None), ((2, 7, 9, 3), (2, 2), None), ((2, 7, 7, 2), (3, 3), (2, 2))],
)
def test_max_pool(shape, window, strides):
    x = random(0, shape)

    def run(pool):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(pool(x)))))(x)

    actual = run(lambda x: max_pool(x, window, strides))
    close(actual, run(lambda x: nn.max_pool(x, window, strides or window)))


def test_max_pool_gradient_of_ties():
    x = jnp.zeros((1, 2, 4, 1)).at[0, 1, 2:, 0].set(1.0)
    gradient = jax.grad(lambda x: jnp.sum(max_pool(x, (2, 2))))(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[1, 0, 0, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("image", "kernel", "strides", "padding"),
    [
        ((2, 8, 7, 3), (3, 3, 1, 3), (2, 2), ((1, 1), (1, 1))),
        ((1, 9, 8, 2), (3, 2, 1, 2), (2, 3), "VALID"),
    ],
)
def test_depthwise_equals_grouped_convolution(image, kernel, strides, padding):
    """Compares values and both gradients, with a kernel per client."""
    x, k = random(0, (2, *image)), random(1, (2, *kernel))

    def per_client(name, x, k):
        groups = {"feature_group_count": image[-1], "dimension_numbers": LAYOUT}

        def loss(x, k):
            return jnp.sum(jnp.sin(lowering(name)(x, k, strides, padding, **groups)))

        return jax.value_and_grad(loss, (0, 1))(x, k)

    run = jax.jit(lambda name, x, k: jax.vmap(partial(per_client, name))(x, k), static_argnums=0)
    (expected, want_grads), (actual, grads) = run("xla", x, k), run("auto", x, k)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    close(grads, want_grads)
    assert "conv_general_dilated" not in str(jax.make_jaxpr(lambda x, k: run("auto", x, k))(x, k))


def test_depthwise_accumulates_in_float32():
    x, k = random(0, (2, 12, 12, 4), jnp.bfloat16), random(1, (7, 7, 1, 4), jnp.bfloat16)
    groups = {"feature_group_count": 4, "dimension_numbers": LAYOUT}

    @jax.jit
    def run(x, k):
        y, backward = jax.vjp(lambda x, k: lowering("auto")(x, k, (1, 1), "SAME", **groups), x, k)
        return y, *backward(jnp.ones_like(y))

    wide = run(x.astype(jnp.float32), k.astype(jnp.float32))
    for actual, exact in zip(run(x, k), wide, strict=True):
        assert actual.dtype == jnp.bfloat16
        # Rounding of results has an error of 2^-9; with sums in bfloat16 it is 2^-6.
        error = jnp.max(jnp.abs(actual.astype(jnp.float32) - exact))
        assert error < 2**-8 * float(jnp.max(jnp.abs(exact)))
