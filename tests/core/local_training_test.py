"""Local work: the optimiser's arithmetic, which examples are visited, and scoring."""

from functools import cache
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data
from fedjax_pfl.core.scores import ACCURACY
from fedjax_pfl.core.task import Task

KEY = jax.random.key(3)
SIZES = np.array([0, 1, 3, 5, 8, 11])
BATCH = 4
LOG = 24  # steps that the recorder has room for


def federated(extra: int = 0) -> FederatedData:
    """Every example is its own number; padding points to an example of somebody else."""
    longest = SIZES.max() + extra
    rows = np.full((len(SIZES), longest), SIZES.sum() - 1, np.int32)
    first = np.cumsum(SIZES) - SIZES
    for i, size in enumerate(SIZES):
        rows[i, :size] = np.arange(first[i], first[i] + size)
    split = Split(rows, SIZES.astype(np.int32))
    none = Split(np.zeros((len(SIZES), 0), np.int32), np.zeros(len(SIZES), np.int32))
    x = np.arange(SIZES.sum(), dtype=np.int32)
    return jax.tree.map(jnp.asarray, FederatedData(x, x * 0, split, none, none))


def own(i: int) -> np.ndarray:
    return np.arange(SIZES[i]) + SIZES[:i].sum()


# The optimiser


def quadratic(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
    """2w², so that the gradient is 4w."""
    return (2 * params["w"] ** 2, rest), {"w": 4 * params["w"]}


def trace(rounds: int, steps: int, **settings: Any) -> list[float]:
    """w after each round from w = 2."""
    training = local_training.sgd(batch_size=BATCH, steps=steps, **settings)
    data = client_data(federated(), jnp.asarray(2))
    params = {"w": jnp.float32(2)}
    state = training.optimizer.init(params) if training.keep_optimizer else ()

    @jax.jit
    def fit(params: Any, state: Any, t: jax.Array) -> Any:
        ctx = ClientContext(2, data, t, KEY)
        return local_training.fit(training, quadratic, params, {}, state, ctx)

    seen = []
    for t in range(rounds):
        params, rest, state, _ = fit(params, state, jnp.int32(t))
        assert rest == {}
        assert training.keep_optimizer or state == ()
        seen.append(float(params["w"]))
    return seen


SETTINGS = {"learning_rate": 0.125, "momentum": 0.5, "weight_decay": 0.25, "clip_norm": 4.0}
# Every number is a multiple of a power of two, so float32 holds it exactly:
#   gradient    clipped     + .25 w         m = m/2 + that    w − m/8
#   8           4           4.5             4.5               1.4375
#   5.75        4           4.359375        6.609375          .611328125
#   2.4453125   2.4453125   2.59814453125   5.90283203125     −.12652587890625
KEPT = [1.4375, 0.611328125, -0.12652587890625]
# With m = 0 before each round the second ends at 1.4375 − 4.359375/8, and in the third
# 4 × .892578125 = 3.5703125 is below the limit, so w loses (3.5703125 + .22314453125)/8.
MADE_ANEW = [1.4375, 0.892578125, 0.41839599609375]


def test_three_steps_by_hand():
    """Clip, then decay, then momentum, then the rate."""
    np.testing.assert_allclose(trace(1, 3, **SETTINGS), KEPT[2:], rtol=0, atol=1e-7)


@pytest.mark.parametrize(("keep", "wanted"), [(True, KEPT), (False, MADE_ANEW)])
def test_momentum_between_rounds(keep: bool, wanted: list[float]):
    got = trace(3, 1, keep_optimizer=keep, **SETTINGS)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-7)


def test_the_rate_is_a_function_of_the_round():
    """w ← w − rate(t)·4w: 2 → 1 → 0 at rate 1/8 and 1/4, then still."""

    def rates(t):
        return jnp.asarray([0.125, 0.25, 0.5])[t]

    np.testing.assert_array_equal(trace(3, 1, learning_rate=rates), [1, 0, 0])


def test_either_epochs_or_steps():
    for both in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(ValueError, match="either epochs or steps"):
            local_training.sgd(**both)


# Which examples are visited


def recorder(params: Any, rest: Any, batch: Any, key: jax.Array) -> Any:
    """Writes down every batch; the loss is the mean of the squared numbers of its examples."""
    step = rest["step"]
    numbers = jnp.where(batch.mask, batch.x, -1)
    rest = {"step": step + 1, "batches": rest["batches"].at[step].set(numbers)}
    squares = jnp.where(batch.mask, batch.x.astype(jnp.float32) ** 2, 0.0)
    loss = jnp.sum(squares) / jnp.sum(batch.mask).astype(jnp.float32)
    return (loss, rest), jax.tree.map(jnp.ones_like, params)


def start(size: int) -> Any:
    return {"w": jnp.zeros(())}, {"step": jnp.int32(0), "batches": jnp.full((LOG, size), -1)}


@cache
def visitor(mapped: bool, **settings: Any) -> Any:
    training = local_training.sgd(learning_rate=1.0, momentum=0.5, keep_optimizer=True, **settings)

    def ctx(data: FederatedData, i: jax.Array) -> Any:
        params, rest = start(training.batch_size)
        state = training.optimizer.init(params)
        key, t = jax.random.fold_in(KEY, i), jnp.int32(0)
        ctx = ClientContext(i, client_data(data, i), t, key)
        return local_training.fit(training, recorder, params, rest, state, ctx)

    return jax.jit(jax.vmap(ctx, (None, 0)) if mapped else ctx)


def visited(data: FederatedData, **settings: Any) -> Any:
    """(params, rest, optimiser's state, metrics) of all clients, stacked."""
    return jax.device_get(visitor(True, **settings)(data, jnp.arange(len(SIZES))))


EPOCHS = {"epochs": 3, "batch_size": BATCH}
STEPS = {"steps": 5, "batch_size": BATCH}
ALL = {"steps": 2, "batch_size": 13}  # more than anybody has


@pytest.mark.parametrize("client", range(len(SIZES)))
def test_an_epoch_is_every_example_once(client: int):
    _, rest, _, metrics = visited(federated(), **EPOCHS)
    size = SIZES[client]
    per_epoch = -(-size // BATCH)
    assert rest["step"][client] == 3 * per_epoch
    batches = rest["batches"][client]
    assert (batches[3 * per_epoch :] == -1).all()
    epochs = batches[: 3 * per_epoch].reshape(3, -1)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch[epoch >= 0]), own(client))
        np.testing.assert_array_equal(epoch[size:], -1)  # the last batch is short, not dropped
    if size > 3:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert (np.sort(epochs[0]) != epochs[0]).any()
    # Batches have 4, 4 and 3 examples: a mean over batches would not be the mean over examples.
    wanted = np.mean(own(client) ** 2.0) if size else 0.0
    np.testing.assert_allclose(metrics["loss"][client], wanted, rtol=1e-6)


def test_an_epoch_without_its_short_batch():
    """Of 0, 1, 3, 5, 8, 11 examples, by 4: a batch that is the only one is kept, however short."""
    _, rest, _, _ = visited(federated(), **EPOCHS, drop_last=True)
    np.testing.assert_array_equal(rest["step"], 3 * np.array([0, 1, 1, 1, 2, 2]))
    for client, size in enumerate(SIZES):
        epochs = rest["batches"][client, : rest["step"][client]].reshape(3, -1)
        for epoch in epochs:
            real = epoch[epoch >= 0]
            assert len(real) == (size if size < BATCH else size // BATCH * BATCH)
            assert set(real.tolist()) <= set(own(client).tolist())
            assert len(real) == len(set(real.tolist()))
    # What is left out of one epoch is in another: three times the same of 11 has a chance of 4e-5.
    assert len(set(rest["batches"][5, :6].ravel().tolist())) > 8


@pytest.mark.parametrize("client", range(len(SIZES)))
def test_steps_draw_without_replacement(client: int):
    _, rest, _, _ = visited(federated(), **STEPS)
    size, batches = SIZES[client], rest["batches"][client]
    assert rest["step"][client] == (5 if size else 0)
    for batch in batches[: rest["step"][client]]:
        real = batch[batch >= 0]
        assert len(real) == min(size, BATCH) == len(set(real.tolist()))
        assert set(real.tolist()) <= set(own(client).tolist())
    if size > BATCH:
        assert len({tuple(batch) for batch in batches[:5]}) == 5
        assert len(set(batches[:5].ravel().tolist())) > BATCH


@pytest.mark.parametrize("count", [0, 3, 5_000, 6_000])
def test_a_drawn_batch_is_the_beginning_of_a_random_order(count: int):
    longest, size, key = 6_000, 64, jax.random.key(count)
    whole = np.asarray(batches.random_order(key, longest, jnp.array(count)))
    split = Split(jnp.arange(longest), jnp.array(count))
    data = ClientData(jnp.zeros((longest, 1)), split.rows, split, split, None, None, None, None)
    batch = jax.jit(batches.sample_batch, static_argnums=2)(data, split, size, key)
    assert int(batch.mask.sum()) == min(count, size)
    np.testing.assert_array_equal(batch.y[batch.mask], whole[: min(count, size)])


def test_a_batch_larger_than_the_data_is_all_of_it():
    _, rest, _, metrics = visited(federated(), **ALL)
    for client in range(1, len(SIZES)):
        for batch in rest["batches"][client, :2]:
            np.testing.assert_array_equal(np.sort(batch[batch >= 0]), own(client))
            assert (batch[SIZES[client] :] == -1).all()
        wanted = np.mean(own(client) ** 2.0)
        np.testing.assert_allclose(metrics["loss"][client], wanted, rtol=1e-6)


@pytest.mark.parametrize("settings", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_a_client_without_examples_is_left_untouched(settings: dict[str, Any]):
    params, rest, state, metrics = visited(federated(), **settings)
    assert params["w"][0] == rest["step"][0] == metrics["loss"][0] == 0
    assert all(leaf[0] == 0 for leaf in jax.tree.leaves(state))
    assert (params["w"][1:] < 0).all()
    assert all((leaf[1:] > 0).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("settings", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_together_or_alone_in_a_wider_table(settings: dict[str, Any]):
    """Neither vmap over clients of other sizes nor the table's width changes a single visit."""
    together = visited(federated(), **settings)
    alone = visitor(False, **settings)
    for i in range(len(SIZES)):
        single = jax.device_get(alone(federated(extra=9), jnp.asarray(i)))
        chex.assert_trees_all_equal(single, jax.tree.map(lambda leaf, i=i: leaf[i], together))


# Scoring

# Powers of two: a sum tells which examples are in it, and how often.
POWERS = Task(
    lambda outputs, y, classes: jnp.exp2(outputs),
    (
        ACCURACY._replace(name="power", update=lambda outputs, y, classes: -jnp.exp2(outputs)),
        # A state of more than one number, as a histogram is.
        ACCURACY._replace(
            name="both",
            update=lambda outputs, y, classes: {
                "of_two": jnp.stack([outputs * 0 + 1, jnp.exp2(outputs)], -1)
            },
        ),
    ),
    has_classes=False,
)


def scored(data: FederatedData, batch_size: int) -> local_training.Scores:
    def one(data: FederatedData, i: jax.Array) -> local_training.Scores:
        mine: ClientData = client_data(data, i)
        first = jnp.min(jnp.where(jnp.arange(11) < mine.train.size, mine.train.rows, 99))

        def predict(variables, x):
            return (x - variables).astype(jnp.float32)

        return local_training.evaluate(predict, first, mine, mine.train, POWERS, batch_size)

    return jax.device_get(jax.jit(jax.vmap(one, (None, 0)))(data, jnp.arange(len(SIZES))))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 128])
def test_evaluate_counts_each_example_once(batch_size: int):
    scores = scored(federated(), batch_size)
    np.testing.assert_array_equal(scores.loss, 2.0**SIZES - 1)
    np.testing.assert_array_equal(scores.metrics["power"], 1 - 2.0**SIZES)
    wanted = np.stack([SIZES, 2.0**SIZES - 1], -1)
    np.testing.assert_array_equal(scores.metrics["both"]["of_two"], wanted)
    np.testing.assert_array_equal(scores.examples, SIZES)


def test_evaluate_an_empty_table():
    data = client_data(federated(), jnp.asarray(4))

    def predict(variables, x):
        return x.astype(jnp.float32)

    scores = local_training.evaluate(predict, (), data, data.validation, POWERS)
    zeros = {"power": 0, "both": {"of_two": [0, 0]}}
    assert jax.tree.map(lambda leaf: leaf.tolist(), scores) == (zeros, 0, 0)


@pytest.mark.parametrize("how", [{"epochs": 2}, {"steps": 3}])
def test_a_batch_larger_than_all_data_takes_no_more_memory_and_changes_nothing(how):
    """A batch of a billion examples is padded to 1,024 rows, and trains as one of 1,024."""
    data = federated()
    network = nn.Dense(2)
    x = jnp.zeros((1, 1))

    def trained(batch_size):
        training = local_training.sgd(learning_rate=0.1, batch_size=batch_size, **how)
        variables = network.init(KEY, x)

        def gradient(params, rest, batch, key):
            def loss(params):
                outputs = network.apply({"params": params}, batch.x[:, None].astype(jnp.float32))
                return jnp.sum(jnp.square(outputs[:, 0]) * batch.mask.astype(jnp.float32))

            value, slope = jax.value_and_grad(loss)(params)
            return (value, rest), slope

        def fit(data):
            ctx = ClientContext(5, client_data(data, 5), 0, KEY)
            return local_training.fit(training, gradient, variables["params"], {}, (), ctx)[0]

        shapes = jax.make_jaxpr(fit)(data)
        return fit(data), shapes

    large, shapes = trained(10**9)
    chex.assert_trees_all_equal(large, trained(1024)[0])
    assert "1000000000" not in str(shapes)
