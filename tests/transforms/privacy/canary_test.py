"""Empirical lower bound of ε: a canary client whose participation an observer tries to detect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import beta

import fedjax_pfl as pfl
from fedjax_pfl.core.algorithm import ClientContext, Cohort
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.transforms.privacy.accounting import Sampling, epsilon
from fedjax_pfl.transforms.privacy.client_level import client_privacy

CLIENTS, TRIALS, NOISE, DELTA = 10, 4000, 2.0, 1e-5


@pytest.mark.slow("trains on the digits and repeats a round 8,000 times")
def test_an_attack_on_a_round_stays_below_the_stated_epsilon():
    data = pfl.partition(pfl.datasets.digits(), "iid", clients=CLIENTS, seed=0)
    network = pfl.networks.MLP(outputs=10, hidden=(16,))
    plain = pfl.fedavg(network, pfl.local_sgd(0.1, epochs=2), data.federation)
    private = client_privacy(
        data.federation,
        data.examples,
        clients_per_round=CLIENTS,
        clip_norm=0.5,
        noise_multiplier=NOISE,
    )(plain)
    key, on_device = jax.random.key(0), jax.device_put(data.examples)
    state = plain.init(key)
    payload = state.server

    def train(i, y):
        examples = client_data(on_device._replace(y=y), i)
        return plain.train(payload, (), ClientContext(i, examples, 0, key)).upload

    def uploads(canary_y):
        """Returns the uploads if the labels of client 0, the canary, are these."""
        y = on_device.y
        others = jax.lax.map(lambda i: train(i, y), jnp.arange(1, CLIENTS))
        first = train(jnp.int32(0), canary_y)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, others)

    def released(uploads, key):
        cohort = Cohort(
            ids=jnp.arange(CLIENTS),
            arrived=jnp.ones(CLIENTS, bool),
            weights=jnp.ones(CLIENTS),
            payloads=None,
            uploads=uploads,
            t=0,
            key=key,
        )
        server, _ = private.receive(state, cohort)
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(server)])

    y = on_device.y
    worlds = [jax.jit(uploads)(labels) for labels in (y, (y + 1) % 10)]
    keys = jax.random.split(jax.random.key(1), TRIALS)
    means = [jax.jit(lambda u: jax.lax.map(lambda k: released(u, k), keys))(u) for u in worlds]
    # The observer learns from the first half of the trials and is judged on the second.
    half = TRIALS // 2
    first, second = ([np.asarray(m)[part] for m in means] for part in (np.s_[:half], np.s_[half:]))
    direction = np.mean(first[0], 0) - np.mean(first[1], 0)
    threshold = np.quantile(first[1] @ direction, 0.95)
    hits, false = (int(np.sum(m @ direction > threshold)) for m in second)
    low = beta.ppf(0.025, hits, half - hits + 1)  # Clopper and Pearson
    high = beta.ppf(0.975, false + 1, half - false)
    bound = np.log((low - DELTA) / high)
    assert 0.3 < bound < epsilon(Sampling(CLIENTS, CLIENTS), NOISE, DELTA, 1)
