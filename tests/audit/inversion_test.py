"""Tests of gradient inversion on one linear layer, and of the layers that it can compare."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

import fedjax_pfl as pfl
from fedjax_pfl.audit import inversion
from fedjax_pfl.audit.server_view import by_path, server_view
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.trees import row
from fedjax_pfl.data import client_data
from fedjax_pfl.transforms.compression import compression
from fedjax_pfl.transforms.privacy import local_privacy
from fedjax_pfl.transforms.private_layers import private_layers

RNG = np.random.default_rng(0)
TRAINING = pfl.local_sgd(0.5, steps=1, batch_size=1)
DATA = pfl.partition(
    pfl.arrays(RNG.uniform(size=(40, 4, 4, 1)).astype(np.float32), np.arange(40) % 3),
    "iid",
    clients=20,
    test_fraction=0.5,
    seed=0,
)
EXAMPLES = jax.device_put(DATA.examples)
PIXELS = inversion.Pixels(0.0, 1.0)


def exchange(name, network, transform=None):
    """Returns the download and upload of client 0, and the server's view of its network."""
    method = getattr(pfl, name)(network, TRAINING, DATA.federation)
    method = transform(method) if transform else method
    state, key = method.init(jax.random.key(0)), jax.random.key(1)
    ctx = ClientContext(i=0, data=client_data(EXAMPLES, 0), t=0, key=key)
    payload = method.send(state._replace(clients=()), ctx._replace(data=None))
    upload = method.train(payload, row(state.clients, 0), ctx).upload
    variables = network.init(key, DATA.federation.examples())
    return payload, upload, server_view(method, payload, upload, variables), variables


def attack_on(network, **settings):
    return inversion.Attack(
        network=network,
        task=DATA.federation.task,
        training=TRAINING,
        data=client_data(EXAMPLES, 0),
        t=0,
        **settings,
    )


def example():
    """Returns the only training example of client 0, x [1, 4, 4, 1] and y [1]."""
    rows = EXAMPLES.train.rows[0][:1]
    assert EXAMPLES.train.size[0] == 1
    return np.asarray(EXAMPLES.x)[rows], np.asarray(EXAMPLES.y)[rows]


def test_a_linear_layer_gives_the_example_exactly():
    """The change of row c of the weight is x times the change of bias c."""
    network, (x, y) = pfl.networks.MLP(outputs=3, hidden=()), example()
    _, _, view, _ = exchange("fedavg", network)
    (bias, kernel) = (view.change[path] for path in sorted(view.compared))
    assert (bias.shape, kernel.shape) == ((3,), (16, 3))
    chex.assert_trees_all_close(kernel / bias[None], np.repeat(x.reshape(16, 1), 3, 1), atol=1e-5)
    attack = attack_on(network, smoothness=0.0, iterations=400, restarts=1)
    found = inversion.reconstruct(attack, view, PIXELS, y, x.shape[1:], jax.random.key(0))
    assert inversion.psnr(found.images, x) > 40
    assert found.mismatch < 1e-4


def layers(paths, tree):
    """Returns the layers of a network's parameters among these paths."""
    return {keys[1].key for keys, _ in tree_leaves_with_path(tree) if keystr(keys) in paths}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("fedavg", {"fc1", "fc2"}),
        ("fedper", {"fc1"}),
        ("lg_fedavg", {"fc2"}),
        ("fedproto", set()),
        ("local", set()),
        ("keep_head", {"fc1"}),
        ("scaffold", {"fc1", "fc2"}),
    ],
)
def test_only_layers_that_are_sent_are_compared(name, known):
    """No gradient reaches the pixels if nothing is compared."""
    network, (x, y) = pfl.networks.MLP(outputs=3, hidden=(5,)), example()
    keep_head = private_layers(network, DATA.federation, EXAMPLES, {network.head})
    method, transform = ("fedavg", keep_head) if name == "keep_head" else (name, None)
    *_, view, variables = exchange(method, network, transform)
    assert layers(view.compared, variables) == known
    assert (view.uploaded(variables) is None) == (name not in ("fedavg", "scaffold"))
    if name in ("fedproto", "fedper"):
        mismatch = inversion.mismatch_function(attack_on(network), view, y)
        slope = jax.grad(mismatch)(jnp.asarray(x), variables)
        assert bool(jnp.any(slope)) == bool(known)
    if name == "fedproto":
        attack, key = attack_on(network, iterations=50), jax.random.key(0)
        found = inversion.reconstruct(attack, view, PIXELS, y, x.shape[1:], key)
        assert found.mismatch == 0
        assert inversion.psnr(found.images, x) < inversion.psnr(np.full_like(x, 0.5), x) + 1


def test_uploads_are_compared_as_they_arrive():
    network = pfl.networks.MLP(outputs=3, hidden=())
    *_, exact, variables = exchange("fedavg", network)
    for transform in (
        local_privacy(EXAMPLES, clip_norm=1.0, noise_multiplier=0.1),
        compression(DATA.federation, EXAMPLES, top_k=0.1, feedback=False),
    ):
        payload, upload, view, _ = exchange("fedavg", network, transform)
        change = jax.tree.map(jnp.subtract, upload, payload)
        chex.assert_trees_all_equal(view.change, by_path(change))
        chex.assert_trees_all_close(view.uploaded(variables), upload, atol=1e-6)
        assert any(jnp.any(view.change[path] != exact.change[path]) for path in exact.change)


def test_psnr_and_order():
    image = np.full((2, 2, 1), 0.4)
    np.testing.assert_allclose(inversion.psnr(image, image + 0.1), 20)
    originals = np.stack([image, image + 0.1, image + 0.2])
    order = inversion.match_order(originals[[0, 2, 1]] + 0.01, originals, np.array([7, 5, 5]))
    assert order.tolist() == [0, 2, 1]
    order = inversion.match_order(originals[[1, 0, 2]], originals, np.array([7, 5, 5]))
    assert order.tolist()[0] == 0  # the labels are given
