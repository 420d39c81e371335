"""Tests of gradient inversion: with the server's knowledge, the true image explains the upload."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.audit import inversion
from fedjax_pfl.audit.server_view import by_path, private_paths, sent_paths, server_view
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.trees import row
from fedjax_pfl.data import client_data
from fedjax_pfl.transforms.compression import compression
from fedjax_pfl.transforms.privacy import local_privacy
from fedjax_pfl.transforms.private_layers import private_layers

pytestmark = pytest.mark.slow("searches for images in the uploads of many methods")

RNG = np.random.default_rng(0)
TRAINING = pfl.local_sgd(0.5, steps=1, batch_size=1)
DATA = pfl.partition(
    pfl.arrays(RNG.uniform(size=(60, 4, 4, 1)).astype(np.float32), np.arange(60) % 3),
    "iid",
    clients=20,
    test_fraction=0.34,
    validation_fraction=0.33,
    seed=0,
)
EXAMPLES = jax.device_put(DATA.examples)
PIXELS = inversion.Pixels(0.0, 1.0)
LINEAR = pfl.networks.MLP(outputs=3, hidden=())
MLP = pfl.networks.MLP(outputs=3, hidden=(5,))


def make_method(name, network):
    """Returns a method; keep_head is FedAvg with a private head."""
    if name == "keep_head":
        transform = private_layers(network, DATA.federation, EXAMPLES, {network.head})
        return transform(pfl.fedavg(network, TRAINING, DATA.federation))
    settings = {"peers": 19} if name == "fedfomo" else {}
    return getattr(pfl, name)(network, TRAINING, DATA.federation, **settings)


def new_state(method, spread=0.0):
    """Returns the first state; all its numbers get noise of standard deviation `spread`."""
    leaves, tree = jax.tree.flatten(method.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noised = [
        x + spread * jax.random.normal(key, x.shape) if x.dtype == jnp.float32 else x
        for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noised)


CTX = ClientContext(i=0, data=client_data(EXAMPLES, 0), t=0, key=jax.random.key(1))


def exchange(method, state, network, plain=None, **settings):
    """Returns the attack on client 0, which knows its state, and its round.

    `plain` is the method without transforms of uploads, by default `method`.
    """
    payload = method.send(state._replace(clients=()), CTX._replace(data=None))
    client = row(state.clients, 0)
    upload = method.train(payload, client, CTX).upload
    attack = inversion.Attack(
        train=(plain or method).train,
        data=inversion.attacked_data(CTX.data, 1),
        compared=sent_paths(method, payload, upload),
        init_private=lambda key: {},
        **settings,
    )
    exchange = inversion.Exchange(payload, client, upload, attack.data.x, attack.data.y, 0, 0)
    return attack, exchange, dict(network.init(CTX.key, DATA.federation.examples()))


def example():
    """Returns the only training example of client 0, x [1, 4, 4, 1] and y [1]."""
    assert EXAMPLES.train.size[0] == 1
    rows = EXAMPLES.train.rows[0][:1]
    return EXAMPLES.x[rows], EXAMPLES.y[rows]


def test_a_linear_layer_gives_the_example_exactly():
    """The change of row c of the weight is x times the change of bias c."""
    x, _ = example()
    method = make_method("fedavg", LINEAR)
    attack, round_of_client, _ = exchange(
        method, new_state(method), LINEAR, smoothness=0.0, iterations=400, restarts=1
    )
    attempt = inversion.reconstruct(attack, round_of_client, PIXELS, jax.random.key(0))
    assert inversion.psnr(attempt.images, x) > 40
    assert attempt.mismatch < 1e-4


@pytest.mark.parametrize(
    "name",
    ["fedper", "keep_head", "lg_fedavg", "scaffold", "pfedme", "fedproto", "fedfomo", "pfedla"],
)
def test_the_true_image_has_the_uploaded_change(name):
    """Holds for every method if the attacker knows the private layers."""
    x, _ = example()
    method = make_method(name, MLP)
    attack, round_of_client, _ = exchange(method, new_state(method, 0.1), MLP)

    @jax.jit
    def compare(images):
        slope = jax.grad(inversion.mismatch, 2)(attack, round_of_client, images, {})
        return inversion.changes(attack, round_of_client, images, {}), slope

    (computed, uploaded), _ = compare(x)
    assert jnp.linalg.norm(uploaded) > 1e-3
    chex.assert_trees_all_close(computed, uploaded, atol=1e-6)
    (computed, _), slope = compare(1 - x)
    assert jnp.linalg.norm(computed - uploaded) > 1e-3
    assert jnp.all(jnp.isfinite(slope))
    assert jnp.any(slope)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "pfedla"])
def test_changes_tell_the_inputs_of_fully_connected_layers(name):
    """The weights change by a bᵀ, with the input a and the change b of the bias."""
    x, _ = example()
    method = make_method(name, MLP)
    attack, round_of_client, _ = exchange(method, new_state(method, 0.1), MLP)
    upload = round_of_client.upload
    computed, uploaded = inversion.changes(attack, round_of_client, x, {})
    pixels, *hidden = inversion.layer_inputs(attack, upload, uploaded)
    np.testing.assert_allclose(pixels, np.ravel(x), atol=1e-3)
    assert len(hidden) == (name != "fedper")  # its head is private
    assert inversion.input_error(attack, upload, computed, uploaded) < 1e-5
    other, _ = inversion.changes(attack, round_of_client, x + 0.5, {})
    error = inversion.input_error(attack, upload, other, uploaded)
    first = np.concatenate([np.ravel(x), *hidden])
    second = np.concatenate(inversion.layer_inputs(attack, upload, other))
    np.testing.assert_allclose(error, np.sum((first - second) ** 2) / np.sum(first**2), rtol=1e-3)
    assert error > 0.1


def test_the_search_adds_the_error_of_layer_inputs():
    method = make_method("fedavg", MLP)
    settings = {"iterations": 1, "restarts": 1, "smoothness": 0.0}
    attack, round_of_client, _ = exchange(method, new_state(method, 0.1), MLP, **settings)
    for weight in (0.0, 2.0):
        weighted = attack._replace(input_weight=weight)
        attempt = inversion.reconstruct(weighted, round_of_client, PIXELS, jax.random.key(0))
        pair = inversion.changes(attack, round_of_client, attempt.images, {})
        error = inversion.input_error(attack, round_of_client.upload, *pair)
        assert error > 0.01
        expected = attempt.mismatch + weight * error
        np.testing.assert_allclose(attempt.objective, expected, rtol=1e-4)


def test_fedfomo_starts_from_the_clients_own_mixture():
    """Its change is the negative gradient there, times the learning rate."""
    x, y = example()
    method = make_method("fedfomo", MLP)
    state = new_state(method, 0.1)
    attack, round_of_client, _ = exchange(method, state, MLP)
    start = method.personalize(state._replace(clients=()), row(state.clients, 0), CTX)
    gradient = local_training.gradient(MLP, DATA.federation.task, CTX.data)
    batch = Batch(x, y, jnp.ones(1, bool))
    _, grads = gradient(start["params"], {}, batch, jax.random.key(0))
    wanted = by_path({"params": jax.tree.map(lambda g: -0.5 * g, grads)})
    wanted["['weights']"] = jnp.zeros(19)
    _, uploaded = inversion.changes(attack, round_of_client, x, {})
    wanted = jnp.concatenate([wanted[path].ravel() for path in attack.compared])
    chex.assert_trees_all_close(uploaded, wanted, atol=1e-6)
    model = by_path(
        jax.tree.map(jnp.subtract, start["params"], row(state.rows.models, 0)["params"])
    )
    assert all(jnp.any(jnp.abs(leaf) > 0.01) for leaf in model.values())


@pytest.mark.parametrize(
    ("name", "sent", "unknown"),
    [
        ("fedavg", {"fc1", "fc2"}, set()),
        ("fedper", {"fc1"}, {"fc2"}),
        ("lg_fedavg", {"fc2"}, {"fc1"}),
        ("fedproto", {"prototypes"}, {"fc1", "fc2"}),
        ("local", set(), {"fc1", "fc2"}),
        ("keep_head", {"fc1"}, {"fc2"}),
        ("ditto", {"fc1", "fc2"}, set()),
        ("fedfomo", {"fc1", "fc2", "weights"}, set()),
    ],
)
def test_layers_that_stay_on_the_client_are_unknown(name, sent, unknown):
    method = make_method(name, MLP)
    attack, (payload, client, upload, *_), variables = exchange(method, new_state(method), MLP)
    private = private_paths(method, payload, upload, client, variables)
    names = {path.split("['")[-2 if "fc" in path else -1].strip("[']") for path in attack.compared}
    assert names == sent
    assert {path.split("'")[3] for path in private.values()} == unknown
    view = server_view(method, payload, upload, variables)
    assert (view.uploaded(variables) is None) == (not {"fc1", "fc2"} <= sent)


def test_uploads_are_compared_as_they_arrive():
    method = make_method("fedavg", LINEAR)
    state, (x, _) = new_state(method), example()
    exact = exchange(method, state, LINEAR)
    exact_change, _ = inversion.changes(*exact[:2], x, {})
    for transform in (
        local_privacy(EXAMPLES, clip_norm=1.0, noise_multiplier=0.1),
        compression(DATA.federation, EXAMPLES, top_k=0.1, feedback=False),
    ):
        wrapped = transform(method)
        started = wrapped.init(jax.random.key(0))
        payload = wrapped.send(started._replace(clients=()), CTX._replace(data=None))
        upload = wrapped.train(payload, row(started.clients, 0), CTX).upload
        computed, uploaded = inversion.changes(exact[0], exact[1]._replace(upload=upload), x, {})
        chex.assert_trees_all_equal(computed, exact_change)
        view = server_view(wrapped, payload, upload, exact[2])
        arrived = jnp.concatenate([view.change[path].ravel() for path in exact[0].compared])
        chex.assert_trees_all_equal(uploaded, arrived)
        chex.assert_trees_all_close(view.uploaded(exact[2]), upload, atol=1e-6)
        assert jnp.any(uploaded != exact_change)


def test_psnr_and_order():
    image = np.full((2, 2, 1), 0.4)
    np.testing.assert_allclose(inversion.psnr(image, image + 0.1), 20)
    originals = np.stack([image, image + 0.1, image + 0.2])
    order = inversion.match_order(originals[[0, 2, 1]] + 0.01, originals, np.array([7, 5, 5]))
    assert order.tolist() == [0, 2, 1]
    order = inversion.match_order(originals[[1, 0, 2]], originals, np.array([7, 5, 5]))
    assert order.tolist()[0] == 0  # the labels are given
