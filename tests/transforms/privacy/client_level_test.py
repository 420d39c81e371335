"""Tests of client-level privacy: clipping, noise, released uploads, and methods that admit it."""

import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import chi2

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.simulation.rounds import make_rounds
from fedjax_pfl.transforms.privacy import clip_and_noise
from fedjax_pfl.transforms.privacy.client_level import client_privacy, unsupported_reason
from fedjax_pfl.transforms.server_optimizer import server_optimizer
from tests import cases, rules, tiny
from tests.commands import message
from tests.transforms.server_optimizer_test import toy

KEY = jax.random.key(3)
DATA, FEDERATION = tiny.federated()
K, SIZE = tiny.CLIENTS, 20_000
ADMITTED = ("apfl", "ditto", "fedavg", "fedper", "fedrep", "pfedme", "scaffold")
REFUSED = ("factorized_fl", "fedas", "fedmn", "fedproto", "local", "pfedhn", "pfedla")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"clip_norm": -1.0}, "clip_norm is -1.0; it must be above 0"),
        ({"clip_norm": math.nan}, "clip_norm is nan; it must be above 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0; it must be at least 0"),
        ({"clip_norm": 1.0, "quantile": 1.0}, "quantile is 1.0; it must be below 1"),
        ({"bands": 0}, "bands is 0; it must be at least 1"),
        ({"clients_per_round": 0}, "clients_per_round is 0; it must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(settings: dict[str, Any], line: str):
    assert (
        message(partial(client_privacy, FEDERATION, DATA, **{"clients_per_round": K} | settings))
        == line
    )


def private(algorithm: Algorithm, **settings: Any) -> Algorithm:
    return client_privacy(FEDERATION, DATA, clients_per_round=K, **settings)(algorithm)


def receive(
    algorithm: Algorithm, state: State, changes: Any, arrived: Any, key: Any = KEY, t: Any = 0
) -> Any:
    """Returns the new server state after uploads w + change of all clients."""
    payload = algorithm.send(state, ClientContext(0, None, t, key))
    uploads = jax.tree.map(lambda leaf, change: leaf[None] + change, payload, changes)
    ids = jnp.where(jnp.asarray(arrived), jnp.arange(K), K)
    cohort = tiny.cohort(FEDERATION.counts, ids, jnp.asarray(arrived), None, uploads, t)
    return algorithm.receive(state, cohort._replace(key=key))[0]


def vector(size: int, dtype: Any = jnp.float32) -> Algorithm:
    """Returns FedAvg of one array of zeros."""
    first = {"params": {"w": jnp.zeros(size, dtype)}}
    return toy()._replace(init=lambda key, start=None: State(first, (), ()))


def test_updates_are_clipped_as_by_hand_and_absent_clients_count_as_no_change():
    algorithm = private(vector(2), clip_norm=2.0)
    changes = np.zeros((K, 2), np.float32)
    changes[:3] = [[3, 4], [0, 1], [9, 9]]  # norms 5, 1 and that of an absent client
    arrived = np.array([True, True, *[False] * (K - 2)])
    server = receive(algorithm, algorithm.init(KEY), {"params": {"w": changes}}, arrived)
    np.testing.assert_allclose(server["params"]["w"], [1.2 / K, (1.6 + 1) / K], rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"noise_multiplier": 1.0}])
def test_models_in_bfloat16_are_clipped_and_summed_in_float32(settings: Any):
    """Rounded in between, nearly parallel changes would exceed the norm that ε is for."""
    changes = 1 + np.random.default_rng(0).random((K, 50)).round(2)

    def result(dtype: Any) -> jax.Array:
        algorithm = private(vector(50, dtype), clip_norm=1.0, **settings)
        uploads = {"params": {"w": jnp.asarray(changes, jnp.bfloat16).astype(dtype)}}
        return receive(algorithm, algorithm.init(KEY), uploads, np.ones(K, bool))["params"]["w"]

    assert result(jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(result(jnp.bfloat16), result(jnp.float32).astype(jnp.bfloat16))


def test_noise_has_the_stated_variance_and_follows_the_round():
    algorithm = private(vector(SIZE), clip_norm=0.5, noise_multiplier=3.0)
    no_change = {"params": {"w": np.zeros((K, SIZE), np.float32)}}

    def noise(key: Any) -> np.ndarray:
        server = receive(algorithm, algorithm.init(KEY), no_change, np.ones(K, bool), key)
        return np.asarray(server["params"]["w"], np.float64)

    first, second = noise(KEY), noise(jax.random.key(4))
    ratio = np.sum(first**2) / (3.0 * 0.5 / K) ** 2
    low, high = chi2.ppf([1e-4, 1 - 1e-4], SIZE)
    assert low < ratio < high
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    np.testing.assert_array_equal(first, noise(KEY))
    for key in (KEY, *jax.random.split(KEY)):  # draws of a method from its key
        own = clip_and_noise.add_noise(jnp.zeros(SIZE), 1.0, key)
        assert abs(np.corrcoef(first, own)[0, 1]) < 0.03


def test_the_server_sees_equal_uploads_and_no_facts_about_clients():
    cohorts = []

    def spy(state: State, cohort: Any) -> Any:
        cohorts.append(cohort)
        return toy().receive(state, cohort)

    algorithm = private(toy()._replace(receive=spy), clip_norm=1.0, noise_multiplier=1.0)
    state = algorithm.init(KEY)
    rng = np.random.default_rng(0)
    changes = jax.tree.map(lambda x: rng.normal(size=(K, *x.shape)) * 9, state.server)
    receive(algorithm, state, changes, [True, False, *[True] * (K - 2)])
    released = cohorts[-1]
    assert released.ids.tolist() == [K] * K
    assert released.arrived.all()
    assert released.weights.tolist() == [1.0] * K
    for leaf in jax.tree.leaves(released.uploads):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))


def test_variances_are_not_negative():
    first = {"params": {"w": jnp.zeros(2)}, "batch_stats": {"norm": {"var": jnp.zeros(500)}}}
    plain = toy()._replace(init=lambda key, start=None: State(first, (), ()))
    algorithm = private(plain, clip_norm=1.0, noise_multiplier=1.0)
    changes = jax.tree.map(lambda x: np.zeros((K, *x.shape), np.float32), first)
    server = receive(algorithm, algorithm.init(KEY), changes, np.ones(K, bool))
    variances = np.asarray(server["batch_stats"]["norm"]["var"])
    assert (variances >= 0).all()
    assert variances.any()


def test_the_norm_follows_the_quantile_with_its_share_of_the_noise():
    norms = np.linspace(1, 2, K, dtype=np.float32)
    changes = {"params": {"w": norms[:, None] * np.float32([[1, 0]])}}
    plain = private(vector(2), clip_norm=1.5, quantile=0.9)
    share = np.mean(norms <= 1.5)
    server = receive(plain, plain.init(KEY), changes, np.ones(K, bool))
    np.testing.assert_allclose(server.clip_norm, 1.5 * np.exp(-0.2 * (share - 0.9)), rtol=1e-5)
    # An absent client counts neither as below the norm nor as above it.
    arrived = np.arange(K) >= K - 3
    below = np.sum(norms[arrived] <= 1.5)
    server = receive(plain, plain.init(KEY), changes, arrived)
    expected = 1.5 * np.exp(-0.2 * (below - 0.9 * 3) / K)
    np.testing.assert_allclose(server.clip_norm, expected, rtol=1e-5)
    noised = private(vector(SIZE), clip_norm=0.5, noise_multiplier=3.0, quantile=0.5)
    no_change = {"params": {"w": np.zeros((K, SIZE), np.float32)}}
    run = jax.jit(lambda key: receive(noised, noised.init(KEY), no_change, np.ones(K, bool), key))
    servers = [run(jax.random.key(k)) for k in range(200)]
    variance = np.mean(np.square(servers[0].method["params"]["w"]))
    np.testing.assert_allclose(variance, (3.0 * 0.5 / K) ** 2 / 0.9, rtol=0.05)
    log_norms = -np.log(np.array([s.clip_norm for s in servers]) / 0.5) / 0.2
    np.testing.assert_allclose(log_norms.std() * K, 3.0 / (2 * np.sqrt(0.1)), rtol=0.25)
    assert noised.observe(noised.init(KEY))["clip_norm"] == 0.5


@pytest.mark.parametrize("settings", [{"quantile": 0.5}, {"bands": 2}])
def test_a_server_optimizer_steps_the_model_inside_the_state_of_privacy(settings: Any):
    algorithm = private(vector(3), clip_norm=2.0, noise_multiplier=0.5, **settings)
    changes = {"params": {"w": np.ones((K, 3), np.float32)}}

    def server_after_a_round(algorithm: Algorithm) -> Any:
        return receive(algorithm, algorithm.init(KEY), changes, np.ones(K, bool))

    expected = server_after_a_round(algorithm)
    for rate in (1.0, 0.5):
        server = server_after_a_round(server_optimizer(DATA, optax.sgd(rate))(algorithm)).method
        w = rate * expected.method["params"]["w"]
        chex.assert_trees_all_equal(server, expected._replace(method={"params": {"w": w}}))


EQUAL = FEDERATION._replace(counts=np.full(K, 5))


def rounds_of(algorithm: Algorithm, rounds: int = 3) -> Any:
    compiled = make_rounds(algorithm, EQUAL, cohort=K, max_rounds=4)
    state, _ = compiled.run(KEY, compiled.init(KEY), DATA, jnp.int32(0), jnp.int32(rounds))
    return jax.device_get(state)


@pytest.mark.slow("two runs of each method")
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_without_clipping_and_noise_the_run_is_the_plain_one_bit_for_bit(name: str):
    plain = rounds_of(cases.make(name, EQUAL))
    chex.assert_trees_all_equal(rounds_of(private(cases.make(name, EQUAL))), plain)
    loose = rounds_of(private(cases.make(name, EQUAL), clip_norm=1e6))
    chex.assert_trees_all_close(loose, plain, atol=1e-4)  # another order of operations


@pytest.mark.parametrize("value", [jnp.nan, 1e10])
def test_an_update_that_is_too_large_has_no_effect_and_is_not_rejected(value: float):
    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        bad = jax.tree.map(lambda leaf: jnp.where(ctx.i == 0, value, leaf + 1), payload)
        return ClientResult(bad, bad, bad, {"loss": jnp.zeros(())})

    plain = vector(2)._replace(
        train=train,
        init=lambda key, start=None: State(
            {"params": {"w": jnp.zeros(2)}}, (), {"params": {"w": jnp.zeros((K, 2))}}
        ),
        predict=lambda variables, x: jnp.zeros((len(x), tiny.CLASSES)),
    )
    compiled = make_rounds(private(plain, clip_norm=100.0), EQUAL, cohort=K)
    state, (log,) = compiled.run(KEY, compiled.init(KEY), DATA, jnp.int32(0), jnp.int32(1))
    assert not log.rejected.any()
    np.testing.assert_allclose(state.server["params"]["w"], np.full(2, (K - 1) / K), rtol=1e-6)
    np.testing.assert_array_equal(state.clients["params"]["w"][:, 0], [0.0, *[1.0] * (K - 1)])


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_use_more_than_means_are_refused(name: str):
    with pytest.raises(UsageError, match=r"^client-level privacy is not possible here: [^\n]+$"):
        private(cases.make(name, FEDERATION), clip_norm=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {
                "send": lambda state, ctx: jax.tree.map(
                    lambda x: x + jnp.float32(ctx.i), state.server
                )
            },
            "differs",
        ),
        (
            {
                "receive": lambda state, cohort: (
                    jax.tree.map(lambda x: jnp.median(x, 0), cohort.uploads),
                    state.rows,
                )
            },
            "other than through their mean",
        ),
    ],
)
def test_user_defined_methods_are_checked_too(change: Any, reason: str):
    with pytest.raises(UsageError, match=reason):
        private(toy()._replace(**change), clip_norm=1.0)
    with pytest.raises(UsageError, match="several architectures"):
        private(by_group((toy(), toy())), clip_norm=1.0)
    with pytest.raises(UsageError, match="need a finite clip_norm"):
        private(toy(), clip_norm=math.inf, noise_multiplier=1.0)


@pytest.mark.slow("rules of the contract around every method that admits privacy")
@pytest.mark.parametrize("name", cases.NAMES)
def test_admitted_methods_keep_the_rules(name: str):
    method = cases.make(name, FEDERATION)
    if unsupported_reason(method, DATA):
        assert name not in ADMITTED
        return
    private_mean = client_privacy(
        FEDERATION, DATA, clients_per_round=K, clip_norm=0.5, noise_multiplier=0.1
    )
    subject = rules.check_transforms(name, private_mean)
    # The server's state depends on the mean of the uploads only.
    state = subject.warm_state._replace(clients=())
    cohort = subject.cohort(np.ones(K, bool))._replace(weights=np.ones(K, np.float32))
    first = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), cohort.payloads)
    cohort = cohort._replace(payloads=first)
    means = jax.tree.map(
        lambda leaf: np.broadcast_to(leaf.mean(0, keepdims=True), leaf.shape), cohort.uploads
    )
    receive = jax.jit(method.receive)
    chex.assert_trees_all_close(
        receive(state, cohort), receive(state, cohort._replace(uploads=means)), atol=1e-5
    )
