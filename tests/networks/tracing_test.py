"""Layers that read flattened images, in small networks whose orders are worked out by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import tracing


def flat(x):
    return x.reshape(len(x), -1)


def channels_first(x):
    return flat(x.transpose(0, 3, 1, 2))


def conv(x, features=4, name="conv"):
    return nn.Conv(features, (1, 1), name=name)(x)


def dense(x, features=5, name="dense"):
    return nn.Dense(features, name=name)(x)


def gate(x, features=4):
    return dense(x.mean((1, 2)), features, "gate")


def pool(x, window):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def norm(x, train=False):
    return nn.BatchNorm(not train, name="norm")(x)


def flattened_channels(forward, shape=(1, 4, 3, 2)):
    """Returns the flattened channels by layer of the network x -> forward(x)."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return forward(x)

    def apply(variables, x):
        return Network().apply(variables, x, mutable=["batch_stats"])[0]

    x = jnp.zeros(shape)
    variables = jax.eval_shape(lambda: dict(Network().init(jax.random.key(0), x)))
    return tracing.flattened_channels(apply, variables, x)


def shuffled(x):
    """Swaps the inner channels of the first pixel's groups, and adds them to x."""
    pixel = x[:, :1, :1]
    groups = pixel.reshape(*pixel.shape[:-1], 2, -1).swapaxes(-1, -2)
    return x + groups.reshape(pixel.shape)


def video(x):
    """Reads the flattened images of a video [1, T, H, W, C] step by step."""
    images = conv(x.reshape(-1, *x.shape[2:]))
    return dense(images.reshape(*x.shape[:2], -1))


KEEPS_ORDER = {
    "activations and dropout": lambda y: nn.Dropout(0.5)(nn.relu(nn.leaky_relu(y)), True),
    "clipped": lambda y: jnp.where(y > 0, jnp.minimum(y, 6), 0.1 * y),
    "sum": lambda y: y + 2 * y,
    "softmax": nn.softmax,
    "unit norm": lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True),
    "times a score": lambda y: y * nn.sigmoid(dense(y.mean(-1, keepdims=True), 1, "score")),
    "times a repeated score": lambda y: y * jnp.repeat(y.mean(-1, keepdims=True), 48, -1),
    "minus the batch's mean": lambda y: y - y.mean(0, keepdims=True),
    "first example": lambda y: y[0],
    "repeated example": lambda y: y[jnp.array([0, 0])],
    "more examples": lambda y: jnp.concatenate([y, 2 * y]),
    "padded batch": lambda y: jnp.pad(y, ((0, 2), (0, 0))),
    "one step": lambda y: jnp.broadcast_to(y[:, None], (1, 3, y.shape[-1])),
    "flattened again": lambda y: flat(y[:, None]),
}


@pytest.mark.parametrize("name", KEEPS_ORDER)
def test_operations_that_keep_the_order_of_a_flattened_image(name):
    found = flattened_channels(lambda x: dense(KEEPS_ORDER[name](flat(conv(x)))))
    assert found == {"dense": 4}


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda x: dense(flat(jnp.concatenate([conv(x, 2), 3 * x], -1))), {"dense": 4}),
        (lambda x: dense(flat(conv(x, 2) + x)), {"dense": 2}),
        (lambda x: dense(flat(conv(x)) + flat(conv(x, 4, "second"))), {"dense": 4}),
        (lambda x: dense(conv(x).reshape(-1)), {"dense": 4}),
        (lambda x: dense(norm(flat(conv(x)))), {"dense": 4, "norm": 4}),
        (lambda x: dense(norm(flat(conv(x)), train=True)), {"dense": 4, "norm": 4}),
        (lambda x: dense(nn.LayerNorm(name="norm")(flat(conv(x)))), {"dense": 4, "norm": 4}),
        (lambda x: dense(flat(nn.GroupNorm(2, name="norm")(conv(x)))), {"dense": 4}),
        (lambda x: dense(flat(shuffled(conv(x)))), {"dense": 4}),
        (lambda x: dense(dense(flat(conv(x))), 2, "last"), {"dense": 4}),
        (lambda x: dense(nn.GroupNorm(2, name="norm")(dense(x.mean((1, 2)), 6)), 2, "last"), {}),
        # A transposed image is flattened in PyTorch's order.
        (lambda x: dense(jnp.concatenate([channels_first(conv(x)), channels_first(x)], -1)), {}),
        # No order is left.
        (lambda x: dense(jnp.concatenate([conv(x).mean((1, 2)), x.max((1, 2))], -1)), {}),
        (
            lambda x: dense(
                jnp.concatenate([flat(conv(x).mean((1, 2), keepdims=True)), x.max((1, 2))], -1)
            ),
            {},
        ),
        (lambda x: dense(jnp.einsum("bi,ci->bc", flat(y := conv(x)), flat(2 * y))), {}),
        (lambda x: dense(flat(conv(x)).mean(-1, keepdims=True)), {}),
        (lambda x: conv(flat(conv(x)).reshape(*x.shape[:-1], 4), 3, "second"), {}),
        # An image that is transposed and then pooled, cut or padded; and transposed back.
        (lambda x: dense(flat(pool(conv(x).transpose(0, 3, 1, 2), (1, 1, 2, 1)))), {}),
        (lambda x: dense(flat(conv(x).transpose(0, 3, 1, 2).max(2)[..., 1:])), {}),
        (lambda x: dense(flat(conv(x).transpose(0, 3, 1, 2).reshape(1, 4, -1))), {}),
        (lambda x: dense(flat(conv(x).transpose(0, 3, 1, 2).transpose(0, 2, 3, 1))), {"dense": 4}),
        # An image without channels.
        (lambda x: dense(flat(conv(x).max(-1))), {}),
        (lambda x: dense(flat(conv(x, 1)[..., 0])), {}),
        # Maxima over groups of channels, over several images, and of folded pixels.
        (lambda x: dense(flat(conv(x, 8).reshape(1, 4, 3, 4, 2).max(-1))), {"dense": 4}),
        (
            lambda x: dense(flat(jnp.stack([conv(x), 2 * conv(x, 4, "b")], -1).max(-1))),
            {"dense": 4},
        ),
        (lambda x: dense(flat(jnp.squeeze(conv(x)[..., None], -1))), {"dense": 4}),
        (lambda x: dense(flat(nn.relu(conv(x).reshape(-1, 4)).reshape(1, 4, 3, 4))), {"dense": 4}),
        # Steps of a series.
        (lambda x: dense(flat(conv(x).reshape(1, 12, 4) + dense(x, 4, "a").reshape(1, 12, 4))), {}),
        # A dense layer's outputs.
        (lambda x: dense(flat(dense(x, 4, "pixels"))), {}),
        (lambda x: dense(flat(nn.LayerNorm(name="norm")(dense(x, 4, "pixels")))), {}),
        (lambda x: dense(flat(conv(x) + dense(x, 4, "pixels"))), {"dense": 4}),
        (lambda x: dense(flat(pool(dense(x, 4, "pixels"), (1, 2, 1, 1)))), {"dense": 4}),
        (lambda x: dense(flat(conv(x) * gate(x)[:, None, None])), {"dense": 4}),
        (
            lambda x: dense(flat(conv(x) * conv(x.mean(-1, keepdims=True), 1, "a"))),
            {"dense": 4},
        ),
        (lambda x: dense(flat(nn.relu(gate(x, 24).reshape(1, 2, 3, 4)))), {}),
        (lambda x: dense(flat(gate(x, 24).reshape(1, 2, 3, 4).max(-1))), {}),
        (lambda x: dense(flat(conv(gate(x)[:, None, None]))), {}),
    ],
)
def test_layers_that_read_a_flattened_image(forward, expected):
    assert flattened_channels(forward) == expected


def test_images_of_a_video_are_flattened_step_by_step():
    assert flattened_channels(video, (1, 3, 4, 3, 2)) == {"dense": 4}


LOSES_ORDER = {
    "concatenate": lambda y, x: jnp.concatenate([y, flat(conv(x, 4, "second"))], -1),
    "concatenate again": lambda y, x: nn.relu(jnp.concatenate([y, x.mean((1, 2))], -1))[0],
    "slice": lambda y, x: y[:, :8],
    "split": lambda y, x: jnp.split(y, 2, -1)[1],
    "pad": lambda y, x: jnp.pad(y, ((0, 0), (0, 2))),
    "gather": lambda y, x: y[:, np.arange(48)[::-1].copy()],
    "cumsum": lambda y, x: jnp.cumsum(y, -1),
    "sort": lambda y, x: jnp.sort(y, -1),
    "transpose": lambda y, x: y.T,
    "broadcast_in_dim": lambda y, x: jnp.broadcast_to(y[..., None], (1, 48, 4)),
    "reshape": lambda y, x: y.reshape(1, 6, 8),
    "dot_general": lambda y, x: jnp.einsum("bi,bj->bij", y, x.mean((1, 2))),
    "scan": lambda y, x: jax.lax.scan(lambda total, row: (total + row, total), 0 * y[0], y)[1],
}


@pytest.mark.parametrize("name", LOSES_ORDER)
def test_a_flattened_image_that_is_rearranged_is_refused(name):
    operation = name.split()[0]
    line = f"^dense reads images through {operation}, .* unknown; flatten them as"
    with pytest.raises(UsageError, match=line):
        flattened_channels(lambda x: dense(LOSES_ORDER[name](flat(conv(x)), x)))
    # Outputs that no parameter reads may have any order.
    assert flattened_channels(lambda x: LOSES_ORDER[name](flat(conv(x)), x)) == {}


def test_norms_and_convolutions_of_rearranged_images_are_refused():
    with pytest.raises(UsageError, match=r"^norm reads images through concatenate"):
        flattened_channels(lambda x: norm(jnp.concatenate([flat(conv(x)), flat(x)], -1)))
    with pytest.raises(UsageError, match=r"^norm reads images through reshape"):
        flattened_channels(lambda x: nn.GroupNorm(4, name="norm")(flat(conv(x))))
    with pytest.raises(UsageError, match=r"^second reads images through conv_general"):
        flattened_channels(lambda x: nn.Conv(3, (1,), name="second")(flat(conv(x))[:, None]))


def test_outputs_of_a_dense_layer_that_become_an_image_are_refused():
    """PyTorch's view makes other channels of them."""
    with pytest.raises(UsageError, match=r"^conv reads images through reshape, .* is unknown"):
        flattened_channels(lambda x: conv(gate(x, 24).reshape(1, 2, 3, 4)))
    with pytest.raises(UsageError, match=r"^dense reads images through reshape, .* is unknown"):
        flattened_channels(
            lambda x: dense(flat(pool(gate(x, 24).reshape(1, 2, 3, 4), (1, 2, 1, 1))))
        )


def test_groups_of_channels_that_are_flattened_are_refused():
    with pytest.raises(UsageError, match=r"^dense reads images through reshape, .* is unknown"):
        flattened_channels(lambda x: dense(flat(conv(x, 8).reshape(1, 4, 3, 4, 2))))


def test_inputs_that_become_an_image_are_allowed():
    def forward(x):
        return dense(flat(conv(x.reshape(-1, 2, 4, 3))))

    assert flattened_channels(forward, (1, 24)) == {"dense": 4}


def attention(x):
    """Reads the flattened steps [B, T·8] of one layer of a transformer."""
    query, key, value = (dense(x, 8, name).reshape(*x.shape[:2], 2, 4) for name in "qkv")
    weights = nn.softmax(jnp.einsum("bthd,bshd->bhts", query, key))
    heads = jnp.einsum("bhts,bshd->bthd", weights, value).reshape(*x.shape[:2], 8)
    return dense(flat(nn.LayerNorm(name="norm")(heads + dense(heads, 8, "mlp"))))


def test_heads_of_attention_have_the_same_order():
    assert flattened_channels(attention, (1, 6, 8)) == {}


@pytest.mark.parametrize(
    "other",
    [
        lambda x: dense(x.mean((1, 2)), 48, "gate"),
        lambda x: flat(conv(x, 8, "second")[:, ::2]),
        lambda x: channels_first(conv(x, 4, "second")),
    ],
)
def test_a_flattened_image_is_not_combined_with_features_in_another_order(other):
    with pytest.raises(UsageError, match=r"^mul combines a flattened image with features in anoth"):
        flattened_channels(lambda x: (flat(conv(x)) * other(x)).sum(-1))
