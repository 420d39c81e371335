"""Optimisers of clients, compared with optax over the same batches; schedules; masks; errors."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl.core import local_training, optimizers
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.settings.general import SETTINGS
from tests import tiny

KEY = jax.random.key(3)
DATA, _ = tiny.federated()
CLIENT = 2  # with 9 examples
STEPS = 4
PARAMS = {"kernel": jnp.float32([[0.5, -1.0], [2.0, 0.25]]), "bias": jnp.float32([1.0, -3.0])}
RATE = 0.05
TRAINING = {"learning_rate": RATE, "batch_size": 4, "steps": STEPS}


def value_of(**settings: Any) -> Any:
    return {**{name: row.default_value for name, row in SETTINGS.items()}, **settings}.__getitem__


def by_name(name: str, **settings: Any) -> optax.GradientTransformation:
    return optimizers.OPTIMIZERS[name](value_of(**settings))


def gradient(params: Any, non_params: Any, batch: Any, key: jax.Array) -> Any:
    """Gradient that depends on the batch and differs between parameters."""
    size = jnp.sum(jnp.where(batch.mask[:, None], batch.x, 0.0))
    grads = jax.tree.map(lambda w: jnp.cos(3 * w) * size + w, params)
    n, sums = non_params["n"], non_params["sums"]
    return (size, {"sums": sums.at[n].set(size), "n": n + 1}), grads


def fitted(training: local_training.Training, state: Any = (), t: int = 0) -> Any:
    """Returns parameters and the optimiser's state after local training, and the batches' sums."""
    ctx = ClientContext(CLIENT, client_data(DATA, jnp.int32(CLIENT)), jnp.int32(t), KEY)
    non_params = {"sums": jnp.zeros(3 * STEPS), "n": jnp.int32(0)}
    fit = jax.jit(local_training.fit, static_argnums=(0, 1))
    params, non_params, state, _ = fit(training, gradient, PARAMS, non_params, state, ctx)
    return params, state, non_params["sums"][: int(non_params["n"])]


def loop(optimizer: optax.GradientTransformation, sums: Any, state: Any = None) -> Any:
    """Trains in a Python loop over the same batches."""
    params = PARAMS
    state = optimizer.init(params) if state is None else state
    for size in sums:
        grads = jax.tree.map(lambda w, size=size: jnp.cos(3 * w) * size + w, params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def only_kernel(params: Any) -> Any:
    return {name: name == "kernel" for name in params}


CASES = [
    ("sgd", {}, optax.sgd(RATE)),
    ("sgd", {"momentum": 0.9}, optax.sgd(RATE, momentum=0.9)),
    (
        "sgd",
        {"weight_decay": 0.5, "decay_vectors": False},
        optax.chain(optax.add_decayed_weights(0.5, only_kernel), optax.sgd(RATE)),
    ),
    ("adam", {}, optax.adam(RATE)),
    ("adam", {"b1": 0.5, "b2": 0.9, "eps": 0.1}, optax.adam(RATE, b1=0.5, b2=0.9, eps=0.1)),
    ("adamw", {"weight_decay": 0.3}, optax.adamw(RATE, weight_decay=0.3)),
    (
        "adamw",
        {"weight_decay": 0.3, "decay_vectors": False},
        optax.adamw(RATE, weight_decay=0.3, mask=only_kernel),
    ),
    ("adagrad", {}, optax.adagrad(RATE)),
    ("adagrad", {"eps": 0.2}, optax.adagrad(RATE, eps=0.2)),
    ("rmsprop", {}, optax.rmsprop(RATE)),
    (
        "rmsprop",
        {"b2": 0.5, "eps": 0.2, "momentum": 0.8},
        optax.rmsprop(RATE, decay=0.5, eps=0.2, momentum=0.8),
    ),
]


@pytest.mark.parametrize(("name", "settings", "optimizer"), CASES)
def test_optimizers_equal_optax(name: str, settings: Any, optimizer: Any):
    params, _, sums = fitted(local_training.make_training(by_name(name, **settings), **TRAINING))
    assert len(sums) == STEPS == len(set(sums.tolist()))
    chex.assert_trees_all_close(params, loop(optimizer, sums)[0], rtol=1e-6, atol=1e-6)
    assert all((params[k] != PARAMS[k]).all() for k in PARAMS)


def test_optax_optimizer_with_learning_rate():
    """The optimiser has its own schedule; gradients are clipped before."""
    adamw = optax.adamw(optax.cosine_decay_schedule(0.1, STEPS), weight_decay=0.1)
    settings = {**TRAINING, "learning_rate": 1.0, "clip_norm": 0.5}
    params, _, sums = fitted(local_training.make_training(optimizers.with_rate(adamw), **settings))
    clipped = optax.chain(optax.clip_by_global_norm(0.5), adamw)
    chex.assert_trees_all_close(params, loop(clipped, sums)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.slow("a program for each optimiser")
@pytest.mark.parametrize(
    "optimizer",
    [*map(by_name, ("adam", "adamw", "adagrad", "rmsprop")), optimizers.with_rate(optax.adam(1.0))],
)
def test_state_of_bfloat16_parameters_is_float32(optimizer: Any):
    """The last update is the float32 update, rounded once: sums of squares lose no steps."""

    def last_update(dtype: Any) -> jax.Array:
        params = jnp.zeros(1, dtype)

        def step(state: Any, gradient: jax.Array) -> Any:
            update, state = optimizer.update(gradient[None], state, params)
            return state, update

        gradients = jnp.where(jnp.arange(600) < 100, 2.0, 0.5).astype(dtype)
        return jax.lax.scan(step, optimizer.init(params), gradients)[1][-1]

    rounded = last_update(jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    chex.assert_trees_all_close(rounded.astype(jnp.float32), last_update(jnp.float32), rtol=0.005)


# Schedules

OPTAX = {
    "linear": optax.linear_schedule(0.3, 0.03, 10),
    "cosine_decay": optax.cosine_decay_schedule(0.3, 10, 0.1),
    "exponential_decay": optax.exponential_decay(0.3, 10, 0.1),
    "warmup_constant": optax.warmup_constant_schedule(0.03, 0.3, 2),
    "warmup_cosine_decay": optax.warmup_cosine_decay_schedule(0.03, 0.3, 2, 10, 0.03),
}


@pytest.mark.parametrize("name", optimizers.SCHEDULES)
def test_schedules_equal_optax(name: str):
    """Compares ten rounds, and the round after them, when a run is evaluated."""
    factor = optimizers.schedule(name, 0.1, 0.2)
    with jax.numpy_dtype_promotion("standard"):
        expected = [float(OPTAX[name](t)) for t in range(11)]
    actual = [0.3 * float(jax.jit(factor)(t, 10)) for t in range(11)]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert len(set(expected)) > 2


def test_without_warmup_the_rate_is_constant():
    factor = optimizers.schedule("warmup_constant", 0.1, 0.0)
    assert [float(factor(t, 10)) for t in (0, 1, 9)] == [1, 1, 1]


def test_schedule_over_the_steps_of_a_client():
    """The number of steps follows from the client's examples."""
    schedule = optimizers.schedule("linear", 0.1, 0.0)
    settings = {**TRAINING, "step_schedule": schedule, "steps": None, "epochs": 2}
    params, _, sums = fitted(local_training.make_training(by_name("adam"), **settings))
    assert len(sums) == 6  # of 9 examples by 4, twice
    expected, _ = loop(optax.adam(optax.linear_schedule(RATE, 0.1 * RATE, 6)), sums)
    chex.assert_trees_all_close(params, expected, rtol=1e-6, atol=1e-6)


def test_exponential_decay_to_zero_is_an_error():
    with pytest.raises(UsageError, match=r"schedule_end is 0, which .* never reaches"):
        optimizers.schedule("exponential_decay", 0.0, 0.1)


# Errors


def grows(params: Any) -> optax.GradientTransformation:
    """Returns an optimiser whose state grows with every step."""
    return optax.GradientTransformation(
        lambda params: (jnp.zeros(()),), lambda updates, state, params=None: (updates, (*state, 0))
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.polyak_sgd(),
        optax.lbfgs(),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
        optax.stateless(lambda updates, params: jax.tree.map(jnp.sum, updates)),
        grows(PARAMS),
        optax.noisy_sgd(0.1, key=jax.random.key(0)),
    ],
    ids=["value", "line search", "plateau", "other shapes", "state that grows", "random key"],
)
def test_optimizers_that_need_more_than_gradients_are_errors(optimizer: Any):
    with pytest.raises(UsageError, match=r"^optimizer= cannot be used: [^\n]+$"):
        optimizers.check("optimizer=", optimizer)


def test_optimizers_that_need_only_gradients_pass():
    for optimizer in (optax.adamw(0.1), optax.lion(0.1), optax.inject_hyperparams(optax.sgd)(0.1)):
        optimizers.check("optimizer=", optimizer)
