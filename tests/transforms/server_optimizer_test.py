"""Optimisers at the server: the paper's sums, optax's, and which methods they are for."""

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
# What two of three clients upload in each of three rounds, as w + these; the third does not arrive.
CHANGES = np.random.default_rng(0).normal(size=(3, 3, 2, 3)).astype(np.float32)


def toy() -> Algorithm:
    """FedAvg of one array and one statistic."""

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        return ClientResult(payload, payload, client, {"loss": jnp.zeros(())})

    first = {"params": {"w": jnp.asarray(W)}, "batch_stats": {"s": jnp.float32(1)}}
    return Algorithm(
        init=lambda key, start=None: State(first if start is None else start.server, (), ()),
        send=lambda state, ctx: state.server,
        train=train,
        receive=lambda state, cohort: (cohort.mean(cohort.uploads, state.server), state.rows),
        personalize=lambda state, client, ctx: state.server,
        predict=lambda variables, x: x,
        observe=lambda state: {"seen": state.server["params"]["w"]},
    )


def value_of(**settings: Any) -> Any:
    usual = {name: row.default_value for name, row in SERVER_OPTIMIZER.settings.items()}
    return {**usual, **settings}.__getitem__


def named(name: str, **settings: Any) -> Any:
    return SERVER_OPTIMIZERS[name](value_of(server_optimizer=name, **settings))


def rounds(optimizer: Any) -> tuple[list[np.ndarray], list[np.ndarray], State]:
    """w after each round, the mean of each, and the state at the end."""
    made = server_optimizer(DATA, optimizer)(toy())
    state, seen, means = made.init(KEY), [], []
    for change in CHANGES:
        sent = made.send(state._replace(clients=()), ClientContext(0, None, 0, KEY))
        assert set(sent) == {"params", "batch_stats"}
        uploads = {
            "params": {"w": sent["params"]["w"][None] + change},
            "batch_stats": {"s": jnp.float32([5.0, 5.0, 99.0])},
        }
        ids, arrived = jnp.array([0, 1, 6]), jnp.array([True, True, False])
        cohort = tiny.cohort(tiny.TRAIN, ids, arrived, (), uploads, 0)
        means.append(np.asarray(cohort.mean(uploads, sent)["params"]["w"]))
        server, rows = made.receive(state._replace(clients=()), cohort)
        state = State(server, rows, ())
        seen.append(np.asarray(server.method["params"]["w"]))
        np.testing.assert_allclose(server.method["batch_stats"]["s"], 5.0, rtol=1e-6)
    np.testing.assert_array_equal(made.observe(state)["seen"], seen[-1])
    return seen, means, state


def worked_out(name: str, means: list[np.ndarray], eta: float, b1: float, b2: float, tau: float):
    """Algorithm 2 in float64, from the means that the run had."""
    w, m, v = np.float64(W), np.zeros_like(W, float), np.full(W.shape, tau**2)
    found = []
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
        found.append(w)
    return found


@pytest.mark.parametrize(("name", "b1"), [("adam", 0.9), ("yogi", 0.9), ("adagrad", 0.0)])
def test_the_papers_algorithm(name: str, b1: float):
    """Its defaults are those of the paper's experiments; with others, too."""
    seen, means, _ = rounds(named(name, server_learning_rate=0.1))
    np.testing.assert_allclose(seen, worked_out(name, means, 0.1, b1, 0.99, 1e-3), rtol=2e-5)
    own = {"server_b1": 0.5, "server_b2": 0.9, "server_eps": 0.01}
    seen, means, _ = rounds(named(name, server_learning_rate=0.3, **own))
    np.testing.assert_allclose(seen, worked_out(name, means, 0.3, 0.5, 0.9, 0.01), rtol=2e-5)


@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.05), optax.yogi(0.05), optax.sgd(0.5, momentum=0.9)]
)
def test_equals_optax_by_hand(optimizer: optax.GradientTransformation):
    with jax.numpy_dtype_promotion("standard"):
        seen, means, _ = rounds(optimizer)
        w = jnp.asarray(W)
        state = optimizer.init(w)
        for mean, got in zip(means, seen, strict=True):
            step, state = optimizer.update(w - mean, state, w)
            w = optax.apply_updates(w, step)
            np.testing.assert_allclose(got, w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [named("sgd"), optax.sgd(1.0)])
def test_sgd_of_rate_one_is_the_mean_bit_for_bit(optimizer: Any):
    seen, means, _ = rounds(optimizer)
    for one, mean in zip(seen, means, strict=True):
        assert one.tobytes() == mean.tobytes()


def test_momentum_is_the_fedavgm_of_the_documents():
    """The same three rounds of the method that stands there."""
    plain, theirs = cases.make("fedavg", FEDERATION), cases.make("fedavgm", FEDERATION)
    ours = server_optimizer(DATA, named("sgd", server_momentum=0.5))(plain)
    one, other = ours.init(KEY), theirs.init(KEY)
    for t in range(3):
        sent = ours.send(one._replace(clients=()), ClientContext(0, None, t, KEY))
        uploads = jax.tree.map(lambda x: jnp.stack([x + 0.1, x * 0.9, x - 0.3]), sent)
        ids, arrived = jnp.array([0, 4, 6]), jnp.array([True, True, False])
        cohort = tiny.cohort(tiny.TRAIN, ids, arrived, uploads, uploads, t)
        one = one._replace(server=ours.receive(one, cohort)[0])
        other = other._replace(server=theirs.receive(other, cohort)[0])
    found = {name: other.server[name] for name in one.server.method}
    chex.assert_trees_all_close(one.server.method, found, rtol=1e-5, atol=1e-6)


FOR_IT = (
    "fedavg",
    "fedprox",
    "fedper",
    "fedrep",
    "lg_fedavg",
    "fedbn",
    "fedavg_plus",
    "per_fedavg",
    "pfedme",
    "pfedpara",
    "fedem",
    "ditto",
    "apfl",
    "fedala",
    "fedbabu",
    "fedrod",
    "fedsam",
    "l2gd",
)


@pytest.mark.parametrize("name", cases.NAMES)
def test_which_methods_it_is_for(name: str):
    """Those with one server's model of the form of uploads; others say so in a line."""
    around = server_optimizer(DATA, named("adam"))
    if name in FOR_IT:
        around(cases.make(name, FEDERATION))
        return
    with pytest.raises(UsageError, match=r"^server_optimizer is for methods whose [^\n]+$"):
        around(cases.make(name, FEDERATION))


def test_groups_are_refused():
    with pytest.raises(UsageError, match="server_optimizer is for one architecture"):
        server_optimizer(DATA, named("adam"))(by_group((toy(), toy())))


def test_phases_with_and_without_it():
    """A phase begins with the model that the one before has, and its own new moments."""
    _, _, state = rounds(named("adam"))
    plain = transforms.chain(toy())
    chex.assert_trees_all_equal(plain.init(KEY, state).server, state.server.method)
    other = transforms.chain(toy(), server_optimizer(DATA, named("sgd")))
    begun = other.init(KEY, state)
    chex.assert_trees_all_equal(begun.server.method, state.server.method)
    assert not any(leaf.any() for leaf in jax.tree.leaves(begun.server.optimizer))
    chex.assert_trees_all_equal(other.init(KEY, plain.init(KEY)).server.method, toy().init(KEY)[0])


# With noise, in the contract.


def _subject() -> rules.Subject:
    case = cases.CASES["fedper"]

    def make(federation: Any, own: Any = cases.NOTHING) -> Algorithm:
        return transforms.chain(
            cases.make("fedper", federation, own),
            transforms.upload_noise(0.5, 0.1),
            server_optimizer(DATA, named("adam", server_learning_rate=0.05)),
        )

    def fired(first: State, last: State) -> bool:
        pairs = zip(*map(jax.tree.leaves, (first.server, last.server)), strict=True)
        own = trees.layers(last.clients.own)
        return set(own) == {"fc2"} and all(bool((a != b).any()) for a, b in pairs)

    return rules.make_subject("fedper", cases.Case({}, fired, case.bytes_per_visit), make)


@pytest.fixture(scope="module")
def around_fedper() -> rules.Subject:
    return _subject()


@pytest.mark.slow("the contract once more, around several methods")
@pytest.mark.parametrize("rule", [rule.__name__ for rule in rules.RULES])
def test_noise_and_a_server_optimizer_keep_the_contract(rule: str, around_fedper: rules.Subject):
    rules.BY_NAME[rule](around_fedper)
