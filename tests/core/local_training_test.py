"""Local training: arithmetic of the optimiser, the batches of a client, and evaluation."""

from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import batches, local_training
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data, take_repeating
from fedjax_pfl.core.metrics import ACCURACY
from fedjax_pfl.core.task import Task

KEY = jax.random.key(3)
SIZES = np.array([0, 1, 3, 5, 8, 11])
BATCH = 4
LOG = 24  # steps that the recorder can store


def federated() -> FederatedData:
    """Returns data whose example j is the number j. Padding is another client's example."""
    rows = np.full((len(SIZES), SIZES.max()), SIZES.sum() - 1, np.int32)
    first = np.cumsum(SIZES) - SIZES
    for i, size in enumerate(SIZES):
        rows[i, :size] = np.arange(first[i], first[i] + size)
    split = Split(rows, SIZES.astype(np.int32))
    none = Split(np.zeros((len(SIZES), 0), np.int32), np.zeros(len(SIZES), np.int32))
    x = np.arange(SIZES.sum(), dtype=np.int32)
    return jax.tree.map(jnp.asarray, FederatedData(x, x * 0, split, none, none))


def examples_of(i: int) -> np.ndarray:
    return np.arange(SIZES[i]) + SIZES[:i].sum()


# The optimiser


def quadratic(params: Any, non_params: Any, batch: Any, key: jax.Array) -> Any:
    """Loss 2w² with gradient 4w."""
    return (2 * params["w"] ** 2, non_params), {"w": 4 * params["w"]}


def run_rounds(rounds: int, steps: int, max_steps: Any = None, **settings: Any) -> list[float]:
    """Returns w after every round, starting from w = 2."""
    training = local_training.sgd(batch_size=BATCH, steps=steps, **settings)
    data = client_data(federated(), jnp.asarray(2))
    params = {"w": jnp.float32(2)}
    state = training.optimizer.init(params) if training.keep_optimizer else ()

    @jax.jit
    def fit(params: Any, state: Any, t: jax.Array) -> Any:
        ctx = ClientContext(2, data, t, KEY, max_steps)
        return local_training.fit(training, quadratic, params, {}, state, ctx)

    ws = []
    for t in range(rounds):
        params, non_params, state, _ = fit(params, state, jnp.int32(t))
        assert non_params == {}
        assert training.keep_optimizer or state == ()
        ws.append(float(params["w"]))
    return ws


def test_a_training_stops_after_max_steps():
    assert run_rounds(2, 5, max_steps=2, learning_rate=0.125) == [0.5, 0.125]
    assert run_rounds(2, 2, max_steps=5, learning_rate=0.125) == [0.5, 0.125]


SETTINGS = {"learning_rate": 0.125, "momentum": 0.5, "weight_decay": 0.25, "clip_norm": 4.0}
# All numbers are exact in float32:
#   gradient    clipped     + 0.25 w        m = m/2 + this    w − m/8
#   8           4           4.5             4.5               1.4375
#   5.75        4           4.359375        6.609375          0.611328125
#   2.4453125   2.4453125   2.59814453125   5.90283203125     −0.12652587890625
KEPT_MOMENTUM = [1.4375, 0.611328125, -0.12652587890625]
# With m = 0 before each round, the second ends at 1.4375 − 4.359375/8. In the third,
# 4 × 0.892578125 = 3.5703125 is not clipped, and w decreases by (3.5703125 + 0.22314453125)/8.
RESET = [1.4375, 0.892578125, 0.41839599609375]


@pytest.mark.parametrize(("keep", "expected"), [(True, KEPT_MOMENTUM), (False, RESET)])
def test_momentum_is_kept_or_reset_between_rounds(keep: bool, expected: list[float]):
    """The order is clip, decay, momentum, learning rate."""
    actual = run_rounds(3, 1, keep_optimizer=keep, **SETTINGS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-7)
    last = run_rounds(1, 3, keep_optimizer=keep, **SETTINGS)
    np.testing.assert_allclose(last, KEPT_MOMENTUM[2:], rtol=0, atol=1e-7)


def test_learning_rate_per_round():
    """w ← w − rate(t)·4w: 2 → 1 → 0 with rates 1/8 and 1/4, then constant."""

    def rates(t):
        return jnp.asarray([0.125, 0.25, 0.5])[t]

    np.testing.assert_array_equal(run_rounds(3, 1, learning_rate=rates), [1, 0, 0])


def test_epochs_and_steps_exclude_each_other():
    for settings in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(ValueError, match="either epochs or steps"):
            local_training.sgd(**settings)


# Batches


def recorder(params: Any, non_params: Any, batch: Any, key: jax.Array) -> Any:
    """Records every batch. The loss is the mean of the squared numbers of its examples."""
    step = non_params["step"]
    numbers = jnp.where(batch.mask, batch.x, -1)
    non_params = {"step": step + 1, "batches": non_params["batches"].at[step].set(numbers)}
    squares = jnp.where(batch.mask, batch.x.astype(jnp.float32) ** 2, 0.0)
    loss = jnp.sum(squares) / jnp.sum(batch.mask).astype(jnp.float32)
    return (loss, non_params), jax.tree.map(jnp.ones_like, params)


def start(size: int) -> Any:
    return {"w": jnp.zeros(())}, {"step": jnp.int32(0), "batches": jnp.full((LOG, size), -1)}


@cache
def fit_clients(**settings: Any) -> Any:
    """Returns (params, non_params, optimiser state, metrics) of all clients, stacked."""
    training = local_training.sgd(learning_rate=1.0, momentum=0.5, keep_optimizer=True, **settings)
    data = federated()

    def fit(i: jax.Array) -> Any:
        params, non_params = start(training.batch_size)
        state = training.optimizer.init(params)
        key, t = jax.random.fold_in(KEY, i), jnp.int32(0)
        ctx = ClientContext(i, client_data(data, i), t, key)
        return local_training.fit(training, recorder, params, non_params, state, ctx)

    results = jax.device_get(jax.jit(jax.vmap(fit))(jnp.arange(len(SIZES))))
    params, non_params, state, metrics = results
    # A client without examples does not change.
    assert params["w"][0] == non_params["step"][0] == metrics["loss"][0] == 0
    assert all(leaf[0] == 0 for leaf in jax.tree.leaves(state))
    assert (params["w"][1:] < 0).all()
    assert all((leaf[1:] > 0).all() for leaf in jax.tree.leaves(state))
    return results


EPOCHS = {"epochs": 3, "batch_size": BATCH}
STEPS = {"steps": 5, "batch_size": BATCH}


@pytest.mark.parametrize("client", [0, 2, 5])
def test_epoch_has_every_example_once(client: int):
    _, non_params, _, metrics = fit_clients(**EPOCHS)
    size = SIZES[client]
    per_epoch = -(-size // BATCH)
    assert non_params["step"][client] == 3 * per_epoch
    batches = non_params["batches"][client]
    assert (batches[3 * per_epoch :] == -1).all()
    epochs = batches[: 3 * per_epoch].reshape(3, -1)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch[epoch >= 0]), examples_of(client))
        np.testing.assert_array_equal(epoch[size:], -1)  # the last batch is short, not dropped
    if size > 3:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert (np.sort(epochs[0]) != epochs[0]).any()
    # Batches have 4, 4 and 3 examples: a mean over batches would not be the mean over examples.
    expected = np.mean(examples_of(client) ** 2.0) if size else 0.0
    np.testing.assert_allclose(metrics["loss"][client], expected, rtol=1e-6)


def test_drop_last():
    """A short batch is dropped, unless it is the only one."""
    _, non_params, _, _ = fit_clients(**EPOCHS, drop_last=True)
    np.testing.assert_array_equal(non_params["step"], 3 * np.array([0, 1, 1, 1, 2, 2]))
    for client, size in enumerate(SIZES):
        epochs = non_params["batches"][client, : non_params["step"][client]].reshape(3, -1)
        for epoch in epochs:
            real = epoch[epoch >= 0]
            assert len(real) == (size if size < BATCH else size // BATCH * BATCH)
            assert set(real.tolist()) <= set(examples_of(client).tolist())
            assert len(real) == len(set(real.tolist()))
    # Another epoch has the dropped examples; dropping the same three times has probability 4e-5.
    assert len(set(non_params["batches"][5, :6].ravel().tolist())) > 8


@pytest.mark.parametrize("client", [0, 2, 5])
def test_steps_sample_without_replacement(client: int):
    _, non_params, _, _ = fit_clients(**STEPS)
    size, batches = SIZES[client], non_params["batches"][client]
    assert non_params["step"][client] == (5 if size else 0)
    for batch in batches[: non_params["step"][client]]:
        real = batch[batch >= 0]
        assert len(real) == min(size, BATCH) == len(set(real.tolist()))
        assert set(real.tolist()) <= set(examples_of(client).tolist())
    if size > BATCH:
        assert len({tuple(batch) for batch in batches[:5]}) == 5
        assert len(set(batches[:5].ravel().tolist())) > BATCH


@pytest.mark.parametrize("count", [0, 3, 5_000])
def test_sample_batch_is_the_start_of_a_random_order(count: int):
    longest, size, key = 6_000, 64, jax.random.key(count)
    order = np.asarray(batches.random_order(key, longest, jnp.array(count)))
    split = Split(jnp.arange(longest), jnp.array(count))
    data = ClientData(jnp.zeros((longest, 1)), split.rows, split, split, None, None, None, None)
    batch = jax.jit(batches.sample_batch, static_argnums=2)(data, split, size, key)
    assert int(batch.mask.sum()) == min(count, size)
    np.testing.assert_array_equal(batch.y[batch.mask], order[: min(count, size)])


# Evaluation


def power(outputs: jax.Array, y: Any = None, classes: Any = None) -> jax.Array:
    """Returns 2 to the power of the outputs, in their dtype."""
    return jnp.exp2(outputs.astype(jnp.float32)).astype(outputs.dtype)


# Powers of two: a sum shows which examples it has, and how often.
POWERS = Task(
    power,
    (
        ACCURACY._replace(name="power", update=lambda outputs, y, classes: -power(outputs)),
        # A state with several numbers, like a histogram.
        ACCURACY._replace(
            name="pair",
            update=lambda outputs, y, classes: {
                "of_two": jnp.stack([outputs * 0 + 1, power(outputs)], -1)
            },
        ),
    ),
    has_classes=False,
)


def scored(data: FederatedData, batch_size: int, dtype: Any = jnp.float32) -> local_training.Scores:
    def evaluate(data: FederatedData, i: jax.Array) -> local_training.Scores:
        client = client_data(data, i)
        train = client.train
        first = jnp.min(jnp.where(jnp.arange(11) < train.size, train.rows, 99))

        def predict(variables, x):
            return (x - variables).astype(dtype)

        return local_training.evaluate(predict, first, client, train, POWERS, batch_size)

    return jax.device_get(jax.jit(jax.vmap(evaluate, (None, 0)))(data, jnp.arange(len(SIZES))))


@pytest.mark.parametrize(
    ("batch_size", "dtype"), [(1, "float32"), (4, "float32"), (128, "float32"), (4, "bfloat16")]
)
def test_evaluate_counts_each_example_once(batch_size: int, dtype: str):
    """Sums are float32 also if a task returns bfloat16, which has no 2047."""
    scores = scored(federated(), batch_size, dtype)
    np.testing.assert_array_equal(scores.loss, 2.0**SIZES - 1)
    np.testing.assert_array_equal(scores.metrics["power"], 1 - 2.0**SIZES)
    expected = np.stack([SIZES, 2.0**SIZES - 1], -1)
    np.testing.assert_array_equal(scores.metrics["pair"]["of_two"], expected)
    np.testing.assert_array_equal(scores.examples, SIZES)


def test_evaluate_without_rows():
    data = client_data(federated(), jnp.asarray(4))

    def predict(variables, x):
        return x.astype(jnp.float32)

    scores = local_training.evaluate(predict, (), data, data.validation, POWERS)
    zeros = {"power": 0, "pair": {"of_two": [0, 0]}}
    assert jax.tree.map(lambda leaf: leaf.tolist(), scores) == (zeros, 0, 0, None)


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"steps": 3}])
def test_huge_batch_size_is_reduced(settings):
    """A batch size of 1e9 is padded to 1,024 rows and trains like 1,024."""

    def gradient(params, non_params, batch, key):
        total = jnp.sum(jnp.where(batch.mask, batch.x, 0)).astype(jnp.float32)
        return (total, non_params), {"w": total + params["w"]}

    def trained(batch_size):
        training = local_training.sgd(learning_rate=0.1, batch_size=batch_size, **settings)

        def fit(data):
            ctx = ClientContext(5, client_data(data, 5), 0, KEY)
            return local_training.fit(training, gradient, {"w": jnp.float32(2)}, {}, (), ctx)[0]

        return fit(federated()), str(jax.make_jaxpr(fit)(federated()))

    large, program = trained(10**9)
    chex.assert_trees_all_equal(large, trained(1024)[0])
    assert "1000000000" not in program


def test_padding_without_a_gradient_leaves_the_gradient_finite():
    """The norm of an example has no slope at 0, which a padded example would be."""

    class Direction:
        def apply(self, variables: Any, x: jax.Array, **options: Any) -> Any:
            return x / jnp.linalg.norm(x, axis=1, keepdims=True) @ variables["params"], {}

    def loss(outputs: jax.Array, y: jax.Array, classes: Any) -> jax.Array:
        return jnp.linalg.norm(outputs - y, axis=1)

    x, y, w = jnp.float32([[3, 4], [5, 6]]), jnp.float32([[1], [1]]), jnp.float32([[2], [1]])
    data = client_data(federated()._replace(x=x, y=y), 0)
    gradient = local_training.gradient(Direction(), Task(loss, ()), data)

    @jax.jit
    def slope(mask: jax.Array) -> Any:
        batch = take_repeating(data, jnp.array([0, 1, 1]), mask)
        return batch, gradient(w, {}, batch, KEY)

    for padding in (2, 3):
        batch, ((value, _), grads) = slope(jnp.arange(3) < 3 - padding)
        real = padding == 2  # the output of the first example is 2
        np.testing.assert_array_equal(batch.x, np.float32([[3, 4]] * 3) * real)
        np.testing.assert_allclose(value, 1.0 * real, rtol=1e-6)
        if real:
            np.testing.assert_allclose(grads, [[0.6], [0.8]], rtol=1e-6)
