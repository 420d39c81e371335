"""Tests of compiled rounds: sampling, dropout, rejected updates, and FedAvg against NumPy."""

from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientResult, Federation, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.core.randomness import INIT, stage_key
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.records import CompiledRounds
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny

KEY = jax.random.key(11)


def scalar(value: int) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


# Sampling and dropout, with an algorithm that only counts.


def counting(clients: int) -> Algorithm:
    """Counts calls of `receive` on the server, and arrivals in the rows and clients."""

    def receive(state, cohort):
        return state.server + 1, state.rows.at[cohort.ids].add(cohort.uploads, mode="drop")

    return Algorithm(
        init=lambda key, start=None: State(jnp.zeros(()), jnp.zeros(clients), jnp.zeros(clients)),
        send=lambda state, ctx: jnp.zeros(5),
        train=lambda payload, client, ctx: ClientResult(
            jnp.ones(()), (), client + 1, {"loss": jnp.ones(())}
        ),
        receive=receive,
        personalize=lambda state, client, ctx: (),
        predict=lambda variables, x: x,
    )


def federation_of(n: int, active: Any = True, groups: Any = 0) -> Federation:
    active, groups = np.broadcast_to(active, n), np.broadcast_to(groups, n)
    return Federation(np.ones(n, int), (1,), 1, active, groups, task=tiny.HALF_SQUARES)


def no_data(clients: int) -> FederatedData:
    split = Split(jnp.zeros((clients, 0), jnp.int32), jnp.zeros(clients, jnp.int32))
    return FederatedData(jnp.zeros((0, 1)), jnp.zeros(0, jnp.int32), split, split, split)


CALLS, COHORT, NOVEL = 600, 3, (2, 5)
ACTIVE = ~np.isin(np.arange(9), NOVEL)


@cache
def compiled_counting(chunk: int) -> CompiledRounds:
    settings = {"cohort": COHORT, "max_rounds": CALLS, "dropout": 0.25, "chunk": chunk}
    return make_rounds(counting(9), federation_of(9, ACTIVE), **settings)


def count_arrivals(chunk: int = 1, seed: int = 11, t: int = 0, n: int = CALLS) -> Any:
    """Returns the state and the log after n rounds."""
    rounds, key = compiled_counting(chunk), jax.random.key(seed)
    state, (log,) = rounds.run(key, rounds.init(key), no_data(9), scalar(t), scalar(n))
    return jax.device_get((state, log))


def test_active_clients_are_sampled_equally():
    _, log = count_arrivals()
    assert (np.diff(log.ids) > 0).all()  # sorted and distinct
    assert ACTIVE[log.ids].all()
    assert log.present.all()
    times = np.bincount(log.ids.ravel(), minlength=9)[ACTIVE]
    expected = CALLS * COHORT / 7
    assert np.sum((times - expected) ** 2 / expected) < 22.5  # 6 degrees of freedom: p = .001
    assert len({tuple(ids) for ids in log.ids}) == 35  # every choice of 3 of 7


def test_rate_of_dropout():
    """Expects 450 of 1800 samples with a standard deviation of 18."""
    _, log = count_arrivals()
    assert abs(log.dropped.sum() - 450) < 75
    rates = np.array([log.dropped[log.ids == i].mean() for i in np.flatnonzero(ACTIVE)])
    assert np.all(np.abs(rates - 0.25) < 0.1)
    assert not log.rejected.any()
    np.testing.assert_array_equal(log.metrics["loss"], ~log.dropped)


def test_only_rows_of_clients_that_arrived_are_written():
    state, log = count_arrivals()
    arrived = np.bincount(log.ids[~log.dropped], minlength=9)
    np.testing.assert_array_equal(state.clients, arrived)
    np.testing.assert_array_equal(state.rows, arrived)
    assert not arrived[list(NOVEL)].any()
    calls = (~log.dropped).any(1).sum()
    assert state.server == calls < CALLS  # no call of `receive` if all clients dropped
    np.testing.assert_array_equal(log.down["payload"], np.full((CALLS, COHORT), 20))
    np.testing.assert_array_equal(log.up["payload"], np.where(log.dropped, 0, 4))


def neighbours(clients: int, size: int) -> Algorithm:
    """Sets a client's first row to its upload, 1, and its second to its neighbour's first."""

    def receive(state, cohort):
        first, _ = state.rows
        new = jnp.broadcast_to(cohort.uploads[:, None], (len(cohort.ids), size))
        return state.server, cohort.put(state.rows, (new, first[(cohort.ids + 1) % clients]))

    def init(key, start=None):
        rows = jnp.tile(jnp.arange(clients, dtype=jnp.float32)[:, None], (1, size))
        return State((), (rows, 2 * rows), jnp.zeros(clients))

    return counting(clients)._replace(init=init, receive=receive)


def test_rows_are_written_in_place():
    """Computes new rows from rows of other clients."""
    n, size = 500, 1000
    rounds = make_rounds(neighbours(n, size), federation_of(n), cohort=2, max_rounds=1)
    arguments = (KEY, rounds.init(KEY), no_data(n), scalar(0), scalar(1))
    run = rounds.run.lower(*arguments).compile()
    assert run.memory_analysis().temp_size_in_bytes < n * size
    state, (log,) = run(*arguments)
    first, ids = np.arange(n), log.ids[0]
    second = 2 * first
    first[ids], second[ids] = 1, (ids + 1) % n
    for rows, expected in zip(state.rows, (first, second), strict=True):
        np.testing.assert_array_equal(rows, np.repeat(expected[:, None], size, 1))


def test_samples_depend_on_seed_and_round_only():
    """Compares other chunks, another first round and another seed."""
    state, log = count_arrivals()
    chex.assert_trees_all_equal((state, log), count_arrivals(chunk=2))
    _, later = count_arrivals(t=40, n=10)
    for name in ("ids", "dropped"):
        np.testing.assert_array_equal(getattr(later, name)[:10], getattr(log, name)[40:50])
    assert not later.present[10:].any()
    assert (count_arrivals(seed=12, n=20)[1].ids[:20] != log.ids[:20]).any()


@pytest.mark.slow("programs for eight devices")
def test_chunks_within_devices():
    """Trains three clients on each of two devices, in chunks of two; the last chunk is padded."""
    axis = (jax.sharding.AxisType.Auto,)
    two = jax.make_mesh((2,), ("clients",), axis, devices=jax.devices()[:2])
    data, federation = tiny.federated()
    results = []
    for options in ({}, {"chunk": 2, "mesh": two}):
        algorithm = cases.make("pfedla", federation)
        rounds = make_rounds(algorithm, federation, cohort=6, max_rounds=2, **options)
        key, placed, t, n = rounds.place((KEY, data, scalar(0), scalar(2)))
        state, logs = rounds.run(key, rounds.init(key), placed, t, n)
        results.append(jax.device_get((state, logs, rounds.evaluate(key, state, placed, n))))
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-5)


def test_an_update_that_is_never_returned_is_not_rejected():
    """No update is finite, and half of them drop out."""

    def train(payload, client, ctx):
        return ClientResult(jnp.float32(jnp.nan), (), client, {"loss": jnp.ones(())})

    algorithm, settings = counting(4)._replace(train=train), {"max_rounds": 9, "dropout": 0.5}
    rounds = make_rounds(algorithm, federation_of(4), cohort=4, **settings)
    state, (log,) = rounds.run(KEY, rounds.init(KEY), no_data(4), scalar(0), scalar(9))
    assert 0 < log.dropped.sum() < 36
    np.testing.assert_array_equal(log.rejected, ~log.dropped)
    assert state.server == 0


@pytest.mark.parametrize("cohort", [0, 8])
def test_a_cohort_must_fit(cohort: int):
    with pytest.raises(UsageError, match=f"clients_per_round is {cohort}, and there are 7 active"):
        make_rounds(counting(9), federation_of(9, ACTIVE), cohort=cohort)


def test_cohorts_of_two_groups():
    """Samples four of seven clients in two groups; client 6 is not active."""
    groups, active = np.array([0, 1, 0, 1, 0, 1, 1]), np.arange(7) < 6
    rounds = make_rounds(
        by_group((counting(7), counting(7))),
        federation_of(7, active, groups),
        cohort=4,
        max_rounds=200,
        dropout=0.4,
    )
    state, logs = jax.device_get(
        rounds.run(KEY, rounds.init(KEY), no_data(7), scalar(0), scalar(200))
    )
    counts = np.stack([log.present.sum(1) for log in logs], 1)
    np.testing.assert_array_equal(counts.sum(1), 4)
    assert {tuple(pair) for pair in counts} == {(1, 3), (2, 2), (3, 1)}
    for g, log in enumerate(logs):
        assert log.ids.shape == (200, 3)  # at most the active clients of the group
        assert (groups[log.ids[log.present]] == g).all()
        is_arrived = log.present & ~log.dropped
        assert not (log.dropped & ~log.present).any()
        for ids, present in zip(log.ids, log.present, strict=True):
            assert len(set(ids[present])) == present.sum()
        arrived = np.bincount(log.ids[is_arrived], minlength=7)
        np.testing.assert_array_equal(state.clients[g], arrived)
        np.testing.assert_array_equal(state.rows[g], arrived)
        assert state.server[g] == is_arrived.any(1).sum() < 200
        np.testing.assert_array_equal(log.down["payload"], 20 * log.present)
        np.testing.assert_array_equal(log.up["payload"], 4 * is_arrived)
    book = ledger.add(ledger.empty(7), logs, 200)
    assert book.total_down == 20 * 4 * 200
    assert sum(book.client_updates) + sum(book.dropped) == 4 * 200
    assert book.client_updates[6] == book.client_down[6] == 0


# FedAvg of a linear model against NumPy.

RATE, MOMENTUM, DECAY, BATCH, EPOCHS = 0.05, 0.5, 0.01, 9, 2
LONG = tiny.TRAIN > BATCH  # clients with several batches per epoch; their examples are equal


def targets(scale: float = 1.0) -> Any:
    """Returns the tiny federation with two real targets per example, in any order."""
    data, federation = tiny.federated()
    rng = np.random.default_rng(5)
    x, y = np.array(data.x), rng.normal(size=(len(data.x), 2))
    y += x @ rng.normal(size=(tiny.FEATURES, 2))
    for i in np.flatnonzero(LONG):
        rows = np.asarray(data.train.rows)[i, : tiny.TRAIN[i]]
        x[rows], y[rows] = x[rows[0]], y[rows[0]]
    data = data._replace(x=jnp.asarray(scale * x), y=jnp.asarray(scale * y, jnp.float32))
    return data, federation._replace(outputs=2, task=tiny.HALF_SQUARES)


def linear() -> Algorithm:
    training = local_training.sgd(
        learning_rate=RATE, momentum=MOMENTUM, weight_decay=DECAY, batch_size=BATCH, epochs=EPOCHS
    )
    return algorithms.fedavg(MLP(2, ()), training, targets()[1])


def oracle(data: Any, kernel: Any, bias: Any) -> list[tuple[Any, Any]]:
    """Returns the model of every client after local training, in float64."""
    models = []
    for i, size in enumerate(tiny.TRAIN):
        rows = np.asarray(data.train.rows)[i, :size]
        x, y = np.float64(np.asarray(data.x)[rows]), np.float64(np.asarray(data.y)[rows])
        w, b = np.float64(kernel), np.float64(bias)
        momenta = np.zeros_like(w), np.zeros_like(b)
        for _ in range(EPOCHS * int(np.ceil(size / BATCH))):
            error = x @ w + b - y
            slopes = x.T @ error / size + DECAY * w, error.mean(0) + DECAY * b
            momenta = tuple(MOMENTUM * m + s for m, s in zip(momenta, slopes, strict=True))
            w, b = w - RATE * momenta[0], b - RATE * momenta[1]
        models.append((w, b))
    return models


def update_norms(models: Any, kernel: Any, bias: Any) -> np.ndarray:
    """Returns the norm of the update of every client."""
    steps = [np.concatenate([(w - kernel).ravel(), b - bias]) for w, b in models]
    return np.linalg.norm(steps, axis=1)


def weighted_mean(models: Any, factors: np.ndarray) -> Any:
    shares = tiny.TRAIN * factors / (tiny.TRAIN * factors).sum()
    return {
        "kernel": sum(share * w for share, (w, _) in zip(shares, models, strict=True)),
        "bias": sum(share * b for share, (_, b) in zip(shares, models, strict=True)),
    }


@cache
def first_model() -> Any:
    return jax.device_get(jax.jit(linear().init)(stage_key(KEY, INIT))).server["params"]["fc1"]


@cache
def limited() -> tuple[CompiledRounds, float]:
    """Returns rounds with a limit that three of the six updates exceed."""
    data, federation = targets()
    third, fourth = np.sort(update_norms(oracle(data, **first_model()), **first_model()))[2:4]
    assert third < 0.98 * fourth
    limit = float(np.sqrt(third * fourth))
    rounds = make_rounds(linear(), federation, cohort=6, max_update_norm=limit)
    return rounds, limit


def one_round(scale: float = 1.0) -> Any:
    """Returns the state, the log, NumPy's models and which updates are within the limit."""
    (rounds, limit), (data, _) = limited(), targets(scale)
    state, (log,) = jax.device_get(rounds.run(KEY, rounds.init(KEY), data, scalar(0), scalar(1)))
    models = oracle(data, **first_model())
    return state, log, models, update_norms(models, **first_model()) <= limit


def test_one_round_against_numpy():
    """Trains clients of different sizes for two epochs; all updates are within the limit."""
    state, log, models, accepted = one_round(scale=0.15)
    assert accepted.all()
    assert not (log.rejected | log.dropped).any()
    expected = weighted_mean(models, np.ones(6))
    chex.assert_trees_all_close(state.server["params"]["fc1"], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected["kernel"] - first_model()["kernel"]).max() > 0.01
    by_client = weighted_mean(models, 1 / tiny.TRAIN)
    assert np.abs(by_client["kernel"] - expected["kernel"]).max() > 0.001


def test_large_updates_are_rejected():
    """Rejects three of six updates, and then all of them."""
    state, log, models, accepted = one_round()
    assert accepted.sum() == 3
    np.testing.assert_array_equal(log.rejected[0], ~accepted)
    expected = weighted_mean(models, accepted)
    chex.assert_trees_all_close(state.server["params"]["fc1"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(log.metrics["loss"][0] > 0, accepted)
    assert all((count > 0).all() for count in log.up.values())  # rejected uploads were sent

    state, log, _, accepted = one_round(scale=8.0)
    assert not accepted.any()
    assert log.rejected.all()
    chex.assert_trees_all_equal(state, jax.device_get(limited()[0].init(KEY)))


def test_a_finite_update_whose_square_overflows_is_rejected_by_default():
    """Uploads 1e37 from client 2."""

    def train(payload, client, ctx):
        upload = jnp.where(ctx.i == 2, jnp.float32(1e37), jnp.float32(1.0))
        return ClientResult(upload, (), client, {"loss": jnp.ones(())})

    algorithm = counting(4)._replace(
        train=train,
        send=lambda state, ctx: jnp.zeros(()),
        receive=lambda state, cohort: (cohort.mean(cohort.uploads, state.server), state.rows),
    )
    rounds = make_rounds(algorithm, federation_of(4), cohort=4)
    state, (log,) = rounds.run(KEY, rounds.init(KEY), no_data(4), scalar(0), scalar(1))
    assert log.rejected[0].tolist() == [False, False, True, False]
    assert float(state.server) == 1.0


def test_a_round_transfers_nothing_to_the_host():
    rounds, _ = limited()
    inputs = rounds.place((targets()[0], scalar(0), scalar(1)))
    key = rounds.place(KEY)
    state, _ = rounds.run(key, rounds.init(key), *inputs)
    with jax.transfer_guard("disallow"):
        state, logs = rounds.run(key, state, *inputs)
        jax.block_until_ready((state, logs))
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            rounds.run(key, state, inputs[0], np.int32(0), inputs[2])
