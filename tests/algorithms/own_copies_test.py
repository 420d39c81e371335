"""Tests that no upload changes parameters that a client does not download.

Privacy and compression change the server's copies only.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms, transforms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.simulation.rounds import make_rounds
from tests import tiny

pytestmark = pytest.mark.slow("two programs for each method")

KEY = jax.random.key(0)
DATA, FEDERATION = tiny.federated()


def changed_uploads(kind: str) -> Any:
    """Returns a transform that changes uploads."""
    if kind == "compression":
        return transforms.compression(FEDERATION, DATA, bits=2)
    return transforms.local_privacy(DATA, clip_norm=1.0, noise_multiplier=1.0)


def served(algorithm: Algorithm, rounds: int) -> tuple[Any, Any]:
    """Returns the models that all clients are served after some rounds, and the state."""
    functions = make_rounds(algorithm, FEDERATION, cohort=FEDERATION.clients, max_rounds=rounds)
    state, _ = functions.run(KEY, functions.init(KEY), DATA, jnp.int32(0), jnp.int32(rounds))

    def model(i: jax.Array) -> Any:
        ctx = ClientContext(i, client_data(DATA, i), jnp.int32(rounds), KEY)
        return algorithm.personalize(state._replace(clients=()), trees.row(state.clients, i), ctx)

    return jax.device_get(jax.vmap(model)(jnp.arange(FEDERATION.clients))), state


@pytest.mark.parametrize(
    "kind",
    [pytest.param("privacy", marks=pytest.mark.slow("the other kind is quick")), "compression"],
)
def test_a_client_that_retains_all_layers_trains_alone(kind: str):
    training = local_training.sgd(learning_rate=0.1, batch_size=4, epochs=1)
    layers = len(tiny.Net().layers)
    method = algorithms.pfedla(tiny.Net(), training, FEDERATION, k=layers, hidden=4, embedding=4)
    models, state = served(method, 3)
    changed, _ = served(transforms.chain(method, changed_uploads(kind)), 3)
    chex.assert_trees_all_close(models, changed, rtol=1e-4, atol=1e-5)
    # Without such a change the server's copy is the client's model.
    chex.assert_trees_all_close(state.rows.theta, state.clients.params, rtol=1e-4, atol=1e-5)


def test_the_factors_of_alpha_stay_on_the_client():
    """Checks that a client's v stays without training, while the server's copy gets noise."""
    training = local_training.sgd(learning_rate=0.0, batch_size=4, epochs=1)
    method = algorithms.factorized_fl(tiny.Net(), training, FEDERATION, share="u", tau=2.0)
    noised = transforms.chain(method, changed_uploads("privacy"))
    functions = make_rounds(noised, FEDERATION, cohort=FEDERATION.clients, max_rounds=1)
    start = jax.device_get(functions.init(KEY))
    models, state = served(noised, 1)
    (layer,) = state.rows["params"]
    v = start.clients.personal["params"][layer]["v"]
    np.testing.assert_array_equal(models["params"][layer]["v"], v)
    assert np.abs(state.rows["params"][layer]["v"] - v).max() > 0.1


@pytest.mark.parametrize("name", ["pfedla", "factorized_fl"])
def test_an_upload_has_the_change_of_training_from_the_clients_own_parameters(name: str):
    """The server's copy differs from them by 1, as after noise."""
    training = local_training.sgd(learning_rate=0.1, batch_size=4, epochs=1)
    settings = {"pfedla": {"k": 3, "hidden": 4, "embedding": 4}, "factorized_fl": {"share": "u"}}
    method = getattr(algorithms, name)(tiny.Net(), training, FEDERATION, **settings[name])
    state, i = jax.jit(method.init)(KEY), jnp.int32(3)
    client = trees.row(state.clients, i)
    state = state._replace(rows=jax.tree.map(lambda leaf: leaf + 1, state.rows))
    payload = method.send(state, ClientContext(i, None, jnp.int32(0), KEY))
    ctx = ClientContext(i, client_data(DATA, i), jnp.int32(0), KEY)
    result = jax.jit(method.train)(payload, client, ctx)
    if name == "pfedla":
        before, after = client.params, result.client.params
        copy, upload = payload["params"], result.upload["params"]
    else:
        before, after, copy, upload = (
            tree["params"]["fc1"]["v"]
            for tree in (client.personal, result.client.personal, payload, result.upload)
        )
    change, expected = (
        jax.tree.map(jnp.subtract, *pair) for pair in ((upload, copy), (after, before))
    )
    chex.assert_trees_all_close(change, expected, rtol=1e-4, atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(expected))
