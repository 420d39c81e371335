"""Tests of server optimisers against the paper, against optax, and for each method."""

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import transforms
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.transforms.server_optimizer import (
    SERVER_OPTIMIZER,
    SERVER_OPTIMIZERS,
    server_optimizer,
)
from tests import cases, rules, tiny

KEY = jax.random.key(3)
DATA, FEDERATION = tiny.federated()
W = np.float32([[0.3, -2.0, 0.7], [1.1, 0.0, -0.4]])
# Changes that three clients upload in each of three rounds; the third is absent.
CHANGES = np.random.default_rng(0).normal(size=(3, 3, 2, 3)).astype(np.float32)


def toy(w: Any = W) -> Algorithm:
    """Returns FedAvg of the array `w` and one statistic."""

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        return ClientResult(payload, payload, client, {"loss": jnp.zeros(())})

    first = {"params": {"w": jnp.asarray(w)}, "batch_stats": {"s": jnp.float32(1)}}
    return Algorithm(
        init=lambda key, start=None: State(first if start is None else start.server, (), ()),
        send=lambda state, ctx: state.server,
        train=train,
        receive=lambda state, cohort: (cohort.mean(cohort.uploads, state.server), state.rows),
        personalize=lambda state, client, ctx: state.server,
        predict=lambda variables, x: x,
        observe=lambda state: {"w": state.server["params"]["w"]},
    )


def value_of(**settings: Any) -> Any:
    defaults = {name: s.default_value for name, s in SERVER_OPTIMIZER.settings.items()}
    return {**defaults, **settings}.__getitem__


def builtin(name: str, **settings: Any) -> Any:
    return SERVER_OPTIMIZERS[name](value_of(server_optimizer=name, **settings))


def rounds(optimizer: Any) -> tuple[list[np.ndarray], list[np.ndarray], State]:
    """Returns w after each round, the mean of the uploads of each round, and the last state."""
    algorithm = server_optimizer(DATA, optimizer)(toy())
    state, history, means = algorithm.init(KEY), [], []
    for change in CHANGES:
        payload = algorithm.send(state._replace(clients=()), ClientContext(0, None, 0, KEY))
        assert set(payload) == {"params", "batch_stats"}
        uploads = {
            "params": {"w": payload["params"]["w"][None] + change},
            "batch_stats": {"s": jnp.float32([5.0, 5.0, 99.0])},
        }
        ids, arrived = jnp.array([0, 1, 6]), jnp.array([True, True, False])
        cohort = tiny.cohort(tiny.TRAIN, ids, arrived, (), uploads, 0)
        means.append(np.asarray(cohort.mean(uploads, payload)["params"]["w"]))
        server, rows = algorithm.receive(state._replace(clients=()), cohort)
        state = State(server, rows, ())
        history.append(np.asarray(server.method["params"]["w"]))
        np.testing.assert_allclose(server.method["batch_stats"]["s"], 5.0, rtol=1e-6)
    np.testing.assert_array_equal(algorithm.observe(state)["w"], history[-1])
    return history, means, state


def reference(name: str, means: list[np.ndarray], eta: float, b1: float, b2: float, tau: float):
    """Returns w after each round by Algorithm 2 in float64, from the means of a run."""
    w, m, v = np.float64(W), np.zeros_like(W, float), np.full(W.shape, tau**2)
    history = []
    for mean in means:
        delta = mean - w
        square = delta**2
        m = b1 * m + (1 - b1) * delta
        if name == "adagrad":
            v = v + square
        elif name == "yogi":
            v = v - (1 - b2) * square * np.sign(v - square)
        else:
            v = b2 * v + (1 - b2) * square
        w = w + eta * m / (np.sqrt(v) + tau)
        history.append(w)
    return history


@pytest.mark.parametrize(("name", "b1"), [("adam", 0.9), ("yogi", 0.9), ("adagrad", 0.0)])
def test_equals_the_papers_algorithm(name: str, b1: float):
    """Checks the defaults, as in the paper's experiments, and other values."""
    history, means, _ = rounds(builtin(name, server_learning_rate=0.1))
    np.testing.assert_allclose(history, reference(name, means, 0.1, b1, 0.99, 1e-3), rtol=2e-5)
    settings = {"server_b1": 0.5, "server_b2": 0.9, "server_eps": 0.01}
    history, means, _ = rounds(builtin(name, server_learning_rate=0.3, **settings))
    np.testing.assert_allclose(history, reference(name, means, 0.3, 0.5, 0.9, 0.01), rtol=2e-5)


MOMENTUM_SGD = optax.sgd(0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("wrapped", "optimizer"),
    [
        (optax.adam(0.05), optax.adam(0.05)),
        (MOMENTUM_SGD, MOMENTUM_SGD),
        (builtin("sgd", server_learning_rate=0.5, server_momentum=0.9), MOMENTUM_SGD),
    ],
)
def test_equals_optax(wrapped: Any, optimizer: optax.GradientTransformation):
    with jax.numpy_dtype_promotion("standard"):
        history, means, _ = rounds(wrapped)
        w = jnp.asarray(W)
        state = optimizer.init(w)
        for mean, new in zip(means, history, strict=True):
            step, state = optimizer.update(w - mean, state, w)
            w = optax.apply_updates(w, step)
            np.testing.assert_allclose(new, w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [builtin("sgd"), optax.sgd(1.0)])
def test_sgd_of_rate_one_is_the_mean_bit_for_bit(optimizer: Any):
    history, means, _ = rounds(optimizer)
    for w, mean in zip(history, means, strict=True):
        assert w.tobytes() == mean.tobytes()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_bfloat16_parameters_get_the_rounded_step_of_float32(name: str):
    """The rate is traced, as in a sweep. Multiples of 1/8 are the same in both dtypes."""
    old, upload = np.round(W * 8) / 8, np.round((W + CHANGES[0, 0]) * 8) / 8

    @partial(jax.jit, static_argnums=0)
    def new_server(dtype: Any, rate: jax.Array) -> Any:
        optimizer = builtin(name, server_learning_rate=rate)
        algorithm = server_optimizer(DATA, optimizer)(toy(jnp.asarray(old, dtype)))
        state, ids = algorithm.init(KEY), jnp.arange(1)
        payload = algorithm.send(state, ClientContext(0, None, 0, KEY))
        uploads = {**payload, "params": {"w": jnp.asarray(upload, dtype)}}
        payloads, uploads = trees.repeat(payload, 1), trees.repeat(uploads, 1)
        cohort = tiny.cohort(tiny.TRAIN, ids, ids >= 0, payloads, uploads, 0)
        return algorithm.receive(state._replace(clients=()), cohort)[0]

    wide, narrow = (new_server(t, jnp.float32(0.3)) for t in (jnp.float32, jnp.bfloat16))
    chex.assert_trees_all_equal(narrow.optimizer, wide.optimizer)
    w, expected = narrow.method["params"]["w"], wide.method["params"]["w"].astype(jnp.bfloat16)
    assert w.dtype == jnp.bfloat16
    np.testing.assert_array_equal(w, expected)
    assert not np.array_equal(w, old)


SUPPORTED = {
    *("apfl", "ditto", "fedala", "fedavg", "fedavg_plus", "fedbabu", "fedbn", "fedem", "fedper"),
    *("fedprox", "fedrep", "fedrod", "fedsam", "l2gd", "lg_fedavg", "per_fedavg", "pfedme"),
    *("fedcp", "fedlc", "fml", "gpfl", "knn_per", "moon", "pfedfda", "pfedpara"),
}


@pytest.mark.slow("builds every method")
@pytest.mark.parametrize("name", cases.NAMES)
def test_unsupported_methods_are_refused(name: str):
    transform = server_optimizer(DATA, builtin("adam"))
    if name in SUPPORTED:
        transform(cases.make(name, FEDERATION))
        return
    with pytest.raises(UsageError, match=r"^server_optimizer is for methods whose [^\n]+$"):
        transform(cases.make(name, FEDERATION))
    with pytest.raises(UsageError, match="server_optimizer is for one architecture"):
        transform(by_group((toy(), toy())))


def test_a_phase_starts_from_the_model_with_new_moments():
    _, _, state = rounds(builtin("adam"))
    fedavg = transforms.chain(toy())
    chex.assert_trees_all_equal(fedavg.init(KEY, state).server, state.server.method)
    sgd = transforms.chain(toy(), server_optimizer(DATA, builtin("sgd")))
    next_state = sgd.init(KEY, state)
    chex.assert_trees_all_equal(next_state.server.method, state.server.method)
    assert not any(leaf.any() for leaf in jax.tree.leaves(next_state.server.optimizer))
    chex.assert_trees_all_equal(sgd.init(KEY, fedavg.init(KEY)).server.method, toy().init(KEY)[0])


# In the contract, around FedPer with noise on uploads


@cache
def around_fedper(with_noise: bool) -> rules.Subject:
    noise = transforms.local_privacy(DATA, clip_norm=0.5, noise_multiplier=0.1)

    def make(federation: Any, settings: Any = cases.NOTHING) -> Algorithm:
        return transforms.chain(
            cases.make("fedper", federation, settings),
            *([noise] if with_noise else []),
            server_optimizer(DATA, builtin("adam", server_learning_rate=0.05)),
        )

    def fired(first: State, last: State) -> bool:
        pairs = zip(*map(jax.tree.leaves, (first.server, last.server)), strict=True)
        return all(bool((a != b).any()) for a, b in pairs)

    case = cases.CASES["fedper"]
    return rules.make_subject("fedper", cases.Case({}, fired, case.bytes_per_visit), make)


# A client with local privacy never uploads numbers that are not finite, so it is not rejected.
WITHOUT_NOISE = (
    "a_round_without_uploads_changes_nothing",
    "a_rejected_upload_is_an_absent_client",
)


@pytest.mark.slow("the contract once more, around several methods")
@pytest.mark.parametrize("rule", rules.BY_NAME)
def test_noise_and_server_optimizer_satisfy_the_contract(rule: str):
    rules.BY_NAME[rule](around_fedper(rule not in WITHOUT_NOISE))
