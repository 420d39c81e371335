"""Optimisers of clients: optax's own over the same batches, schedules, masks, what is refused."""

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
HOW = {"learning_rate": RATE, "batch_size": 4, "steps": STEPS}


def value_of(**settings: Any) -> Any:
    return {**{name: row.default_value for name, row in SETTINGS.items()}, **settings}.__getitem__


def named(name: str, **settings: Any) -> optax.GradientTransformation:
    return optimizers.OPTIMIZERS[name](value_of(**settings))


def gradient(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
    """Of a sum that depends on the batch, and of which every entry has its own."""
    size = jnp.sum(jnp.where(batch.mask[:, None], batch.x, 0.0))
    grads = jax.tree.map(lambda w: jnp.cos(3 * w) * size + w, params)
    return (size, {**rest, "seen": rest["seen"].at[rest["n"]].set(size), "n": rest["n"] + 1}), grads


def fitted(training: local_training.Training, state: Any = (), t: int = 0) -> Any:
    """Parameters and the optimiser's state after a visit, and the batches' sums."""
    ctx = ClientContext(CLIENT, client_data(DATA, jnp.int32(CLIENT)), jnp.int32(t), KEY)
    rest = {"seen": jnp.zeros(3 * STEPS), "n": jnp.int32(0)}
    fit = jax.jit(local_training.fit, static_argnums=(0, 1))
    params, rest, state, _ = fit(training, gradient, PARAMS, rest, state, ctx)
    return params, state, rest["seen"][: int(rest["n"])]


def by_hand(optimizer: optax.GradientTransformation, seen: Any, state: Any = None) -> Any:
    """A plain loop over the same batches."""
    params = PARAMS
    state = optimizer.init(params) if state is None else state
    for size in seen:
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


@pytest.mark.parametrize(("name", "settings", "wanted"), CASES)
def test_equals_optax_over_the_same_batches(name: str, settings: Any, wanted: Any):
    params, _, seen = fitted(local_training.make_training(named(name, **settings), **HOW))
    assert len(seen) == STEPS == len(set(seen.tolist()))
    chex.assert_trees_all_close(params, by_hand(wanted, seen)[0], rtol=1e-6, atol=1e-6)
    assert all((params[k] != PARAMS[k]).all() for k in PARAMS)


def test_names_are_those_of_the_settings():
    assert SETTINGS["optimizer"].default_value in optimizers.OPTIMIZERS
    for name in ("learning_rate", "momentum", "weight_decay", "b1", "b2", "eps"):
        other, names = SETTINGS[name].used_with or ("", ())
        assert other == "optimizer"
        assert set(names) <= set(optimizers.OPTIMIZERS)
    assert set(optimizers.OPTIMIZERS) == {name for name, _, _ in CASES}
    words = set(SETTINGS["optimizer"].meaning.replace(",", "").split())
    assert set(optimizers.OPTIMIZERS) <= words
    settings = set(SETTINGS["server_optimizer"].meaning.replace(",", "").split())
    assert {"sgd", "adam", "yogi", "adagrad"} <= settings


def test_sgd_decays_what_it_is_told_to():
    training = local_training.sgd(weight_decay=0.5, **HOW)
    masked = local_training.make_training(
        named("sgd", weight_decay=0.5, decay_vectors=False), **HOW
    )
    plain = fitted(local_training.sgd(**HOW))[0]
    all_of_it, kernel_only = fitted(training)[0], fitted(masked)[0]
    chex.assert_trees_all_equal(kernel_only["kernel"], all_of_it["kernel"])
    chex.assert_trees_all_equal(kernel_only["bias"], plain["bias"])
    assert (all_of_it["bias"] != plain["bias"]).all()


def test_a_whole_optimizer_is_added_as_it_is():
    """With a rate and a schedule of its own, and clipping before it."""
    whole = optax.adamw(optax.cosine_decay_schedule(0.1, STEPS), weight_decay=0.1)
    how = {**HOW, "learning_rate": 1.0, "clip_norm": 0.5}
    params, _, seen = fitted(local_training.make_training(optimizers.with_rate(whole), **how))
    clipped = optax.chain(optax.clip_by_global_norm(0.5), whole)
    chex.assert_trees_all_close(params, by_hand(clipped, seen)[0], rtol=1e-6, atol=1e-6)


def test_its_state_stays_or_is_made_anew():
    """Two visits are one loop over both where it is kept; else the second begins as the first."""
    kept = local_training.make_training(named("adam"), keep_optimizer=True, **HOW)
    _, state, seen = fitted(kept, kept.optimizer.init(PARAMS))
    again, _, _ = fitted(kept, state)
    _, moments = by_hand(optax.adam(RATE), seen)
    wanted, _ = by_hand(optax.adam(RATE), seen, moments)
    chex.assert_trees_all_close(again, wanted, rtol=1e-6, atol=1e-6)
    anew = local_training.make_training(named("adam"), **HOW)
    first, none, _ = fitted(anew)
    assert none == ()
    chex.assert_trees_all_equal(fitted(anew, ())[0], first)
    assert (first["kernel"] != again["kernel"]).any()


# Schedules

OPTAX = {
    "linear": optax.linear_schedule(0.3, 0.03, 10),
    "cosine_decay": optax.cosine_decay_schedule(0.3, 10, 0.1),
    "exponential_decay": optax.exponential_decay(0.3, 10, 0.1),
    "warmup_constant": optax.warmup_constant_schedule(0.03, 0.3, 2),
    "warmup_cosine_decay": optax.warmup_cosine_decay_schedule(0.03, 0.3, 2, 10, 0.03),
}


@pytest.mark.parametrize("name", optimizers.SCHEDULES)
def test_a_schedule_is_that_of_optax(name: str):
    """At each of ten rounds, and at the one after them, in which a run is evaluated."""
    factor = optimizers.schedule(name, 0.1, 0.2)
    with jax.numpy_dtype_promotion("standard"):
        wanted = [float(OPTAX[name](t)) for t in range(11)]
    got = [0.3 * float(jax.jit(factor)(t, 10)) for t in range(11)]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert len(set(wanted)) > 2


def test_a_schedule_over_a_visits_steps():
    """As optax with a count of its own; how many steps there are follows from the examples."""
    how = {
        **HOW,
        "step_schedule": optimizers.schedule("linear", 0.1, 0.0),
        "steps": None,
        "epochs": 2,
    }
    params, _, seen = fitted(local_training.make_training(named("adam"), **how))
    assert len(seen) == 6  # of 9 examples by 4, twice
    wanted, _ = by_hand(optax.adam(optax.linear_schedule(RATE, 0.1 * RATE, 6)), seen)
    chex.assert_trees_all_close(params, wanted, rtol=1e-6, atol=1e-6)


def test_an_end_that_is_never_reached():
    with pytest.raises(UsageError, match=r"schedule_end is 0, which .* never reaches"):
        optimizers.schedule("exponential_decay", 0.0, 0.1)


# What is refused


def grows(params: Any) -> optax.GradientTransformation:
    """Its state has one more entry with each step."""
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
    ],
    ids=["value", "line search", "plateau", "other shapes", "state that grows"],
)
def test_what_needs_more_than_gradients_is_refused(optimizer: Any):
    with pytest.raises(UsageError, match=r"^optimizer= cannot be used: [^\n]+$"):
        optimizers.check("optimizer=", optimizer, PARAMS)


def test_what_does_not_is_taken():
    for optimizer in (optax.adamw(0.1), optax.lion(0.1), optax.inject_hyperparams(optax.sgd)(0.1)):
        optimizers.check("optimizer=", optimizer, PARAMS)
