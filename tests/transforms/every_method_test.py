"""Rules of the contract for every method among attackers, and with a robust server."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import transforms
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.core.shape_check import check_shapes
from tests import cases, rules, tiny
from tests.transforms.server_optimizer_test import SUPPORTED

DATA, FEDERATION = tiny.federated()
IS_ATTACKER = np.isin(np.arange(tiny.CLIENTS), [1, 4])


@pytest.mark.slow("rules of the contract around every method")
@pytest.mark.parametrize("name", cases.NAMES)
def test_methods_keep_the_rules_among_attackers(name: str):
    rules.check_transforms(
        name,
        transforms.attack_uploads(IS_ATTACKER, "sign_flip"),
        transforms.attack_uploads(IS_ATTACKER, "min_max"),
    )


@pytest.mark.slow("rules of the contract around every method that admits a robust server")
@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_methods_keep_the_rules_with_a_robust_server(name: str):
    rules.check_transforms(name, transforms.robust(FEDERATION, DATA, "trimmed_mean"))


TRANSFORMS = {
    "compression": lambda: transforms.compression(FEDERATION, DATA, top_k=0.5),
    "privacy": lambda: transforms.local_privacy(DATA, clip_norm=1.0, noise_multiplier=1.0),
    "attack": lambda: transforms.attack_uploads(IS_ATTACKER, "sign_flip"),
    "private layers": lambda: transforms.private_layers(tiny.Net(), FEDERATION, DATA, {"fc2"}),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_narrow_upload_stays_narrow(name: str):
    base = cases.make("fedavg", FEDERATION)

    def train(payload, client, ctx):
        result = base.train(payload, client, ctx)
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), result.upload)
        return result._replace(upload=narrow)

    def receive(state, cohort):
        uploads = trees.at_least_float32(cohort.uploads)
        return base.receive(state, cohort._replace(uploads=uploads))

    algorithm = transforms.chain(base._replace(train=train, receive=receive), TRANSFORMS[name]())
    check_shapes("narrow", algorithm, FEDERATION, DATA)

    def upload(key, data):
        ctx = ClientContext(i=0, data=client_data(data, jnp.asarray(0)), t=0, key=key)
        state = algorithm.init(key)
        payload = algorithm.send(state._replace(clients=()), ctx)
        return algorithm.train(payload, trees.row(state.clients, 0), ctx).upload

    leaves = jax.tree.leaves(jax.eval_shape(upload, jax.random.key(0), DATA))
    assert {leaf.dtype for leaf in leaves} == {np.dtype(jnp.bfloat16)}
