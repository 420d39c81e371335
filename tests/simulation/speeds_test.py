"""Tests of simulated time against exact numbers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import transforms
from fedjax_pfl.core.algorithm import Algorithm, ClientResult, State
from fedjax_pfl.core.randomness import SPEED, stage_key
from fedjax_pfl.simulation import speeds
from fedjax_pfl.simulation.rounds import make_rounds
from fedjax_pfl.simulation.speeds import Speeds
from tests import cases, tiny
from tests.simulation.rounds_test import KEY, counting, federation_of, no_data, scalar

pytestmark = pytest.mark.slow("programs with and without late clients")

# Download of 20 bytes and upload of 4 bytes. Seconds of a round without a download: 4/b + steps s.
STEPS = np.array([3, 3, 3, 5])
SECONDS = np.array([1.0, 2.0, 0.5, 1.0])
BANDWIDTH = np.array([4.0, 4.0, 1.0, 2.0])
FIRST_ROUND = [3.0 + 1, 6.0 + 1, 1.5 + 4, 5.0 + 2]
OTHER_ROUNDS = [3.0 + 6, 6.0 + 6, 1.5 + 24, 5.0 + 12]
N = len(STEPS)


def run(client_speeds, chunk=1, **options):
    """Runs three rounds of all clients. Returns the state and the log."""
    settings = {"cohort": N, "max_rounds": 3, "chunk": chunk, **options}
    rounds = make_rounds(counting(N), federation_of(N), client_speeds=client_speeds, **settings)
    state, (log,) = rounds.run(KEY, rounds.init(KEY), no_data(N), scalar(0), scalar(3))
    return jax.device_get((state, log))


def test_seconds_per_step_are_log_normal_and_drawn_by_seed():
    drawn = Speeds(np.ones(9), step_seconds=2.0, spread=0.5)
    values = speeds.step_seconds(drawn, KEY, jnp.arange(20_000))
    z = jax.random.normal(stage_key(KEY, SPEED, 0, 7))
    chex.assert_trees_all_close(values[7], 2 * jnp.exp(0.5 * z), rtol=1e-6)
    assert abs(np.median(values) - 2) < 0.05
    assert abs(np.std(np.log(values)) - 0.5) < 0.02
    two = speeds.step_seconds(drawn, KEY, jnp.array([7, 3]))
    np.testing.assert_allclose(two, [values[7], values[3]], rtol=1e-6)
    assert speeds.step_seconds(drawn, jax.random.key(1), jnp.array([7])) != values[7]


def test_seconds_of_three_rounds_by_hand():
    """Without a deadline, a round lasts until its last client has returned."""
    client_speeds = Speeds(STEPS, SECONDS, bandwidth=BANDWIDTH, free_rounds=1)
    state, log = run(client_speeds)
    np.testing.assert_array_equal(log.seconds, [FIRST_ROUND, OTHER_ROUNDS, OTHER_ROUNDS])
    assert speeds.elapsed([log], 3, None) == 7 + 25.5 + 25.5
    assert speeds.elapsed([log], 1, 10.0) == 17
    assert not log.late.any()
    plain_state, plain_log = run(None)
    chex.assert_trees_all_equal(state, plain_state)
    chex.assert_trees_all_equal(log._replace(seconds=None, late=None), plain_log)
    assert speeds.elapsed([plain_log], 3, None) is None


def test_who_misses_the_deadline_by_hand():
    """A late client is absent, and the round lasts until the deadline."""
    client_speeds = Speeds(STEPS, SECONDS, bandwidth=BANDWIDTH, deadline=7.0, free_rounds=1)
    state, log = run(client_speeds)
    late = np.array([[False] * 4, [True] * 4, [True] * 4])
    np.testing.assert_array_equal(log.late, late)
    np.testing.assert_array_equal(log.dropped, late)
    np.testing.assert_array_equal(log.up["payload"], np.where(late, 0, 4))
    np.testing.assert_array_equal(state.rows, np.ones(4))
    assert state.server == 1
    assert speeds.elapsed([log], 3, None) == 7 + 7 + 7
    assert speeds.late([log], 3) == 8

    longer = client_speeds._replace(deadline=12.0)
    state, log = run(longer)
    np.testing.assert_array_equal(log.late[1:], [[False, False, True, True]] * 2)
    np.testing.assert_array_equal(log.seconds[1:], [[9, 12, 12, 12]] * 2)
    np.testing.assert_array_equal(state.rows, [3, 3, 1, 1])
    chex.assert_trees_all_equal((state, log), run(longer, chunk=3))


def test_the_server_waits_for_a_client_that_drops_out_until_the_deadline():
    client_speeds = Speeds(np.ones(N), step_seconds=2.0, deadline=5.0)
    _, log = run(client_speeds, dropout=0.5)
    np.testing.assert_array_equal(log.seconds, np.where(log.dropped, 5, 2))
    assert 0 < log.dropped.sum() < 12
    assert not log.late.any()
    _, slow_log = run(client_speeds._replace(deadline=1.0), dropout=0.5)
    np.testing.assert_array_equal(slow_log.late, ~log.dropped)  # who drops out is not late too
    _, log = run(client_speeds._replace(deadline=np.inf), dropout=0.5)
    np.testing.assert_array_equal(log.seconds, np.where(log.dropped, 0, 2))


def test_transforms_do_not_change_the_number_of_steps():
    """Batches of four examples, two epochs."""
    data, federation = tiny.federated()
    for transform in (
        transforms.compression(federation, data, bits=8),
        transforms.local_privacy(data, clip_norm=1.0),
        transforms.robust(federation, data, "median"),
    ):
        algorithm = transforms.chain(cases.make("fedavg", federation), transform)
        steps = speeds.round_steps(algorithm, federation, data)
        np.testing.assert_array_equal(steps, 2 * -(-tiny.TRAIN // 4))


# A step of client i adds row i of DIRECTIONS to the model.
DIRECTIONS = np.float32([[1, 0], [0, 1], [2, 2], [-1, 3]])
EXAMPLES = np.array([10, 20, 30, 40])
W = np.float32([0.5, -0.5])


def stepping() -> Algorithm:
    """Averages models, and one statistic that counts the steps of a client."""

    def train(payload, client, ctx):
        tau = ctx.max_steps.astype(jnp.float32)
        w = payload["params"]["w"] + tau * jnp.asarray(DIRECTIONS)[ctx.i]
        upload = {"params": {"w": w}, "batch_stats": {"s": tau}}
        return ClientResult(upload, upload, client + tau, {"loss": jnp.ones(())})

    first = {"params": {"w": jnp.asarray(W)}, "batch_stats": {"s": jnp.zeros(())}}
    return Algorithm(
        init=lambda key, start=None: State(first, (), jnp.zeros(N)),
        send=lambda state, ctx: state.server,
        train=train,
        receive=lambda state, cohort: (cohort.mean(cohort.uploads, state.server), state.rows),
        personalize=lambda state, client, ctx: state.server,
        predict=lambda variables, x: x,
    )


def run_partial(client_speeds, chunk=1):
    """Runs a round of all clients. Returns the state and the log."""
    federation = federation_of(N)._replace(counts=EXAMPLES)
    settings = {"cohort": N, "max_rounds": 1, "chunk": chunk}
    rounds = make_rounds(stepping(), federation, client_speeds=client_speeds, **settings)
    state, (log,) = rounds.run(KEY, rounds.init(KEY), no_data(N), scalar(0), scalar(1))
    return jax.device_get((state, log))


def test_partial_work_and_the_mean_of_fednova_by_hand():
    """Transfers of 24 bytes take 6, 6, 24 and 12 seconds, so 4, 4, -14 and -2 seconds are left."""
    client_speeds = Speeds(STEPS, SECONDS, bandwidth=BANDWIDTH, deadline=10.0)
    client_speeds = client_speeds._replace(partial_bytes=(12, 12))
    state, log = run_partial(client_speeds)
    np.testing.assert_array_equal(log.late[0], [False, True, True, True])
    np.testing.assert_array_equal(log.dropped[0], [False, False, True, True])
    np.testing.assert_array_equal(log.seconds[0], [9, 10, 10, 10])
    np.testing.assert_array_equal(state.clients, [3, 2, 0, 0])
    tau, p = np.array([3, 2]), np.array([10, 20]) / 30
    changes = tau[:, None] * DIRECTIONS[:2]
    expected = W + np.sum(p * tau) * np.sum(p[:, None] * changes / tau[:, None], 0)
    np.testing.assert_allclose(state.server["params"]["w"], expected, rtol=1e-6)
    np.testing.assert_allclose(state.server["batch_stats"]["s"], np.sum(p * tau), rtol=1e-6)
    chex.assert_trees_all_equal((state, log), run_partial(client_speeds, chunk=3))


def test_partial_work_in_bfloat16_stays_in_bfloat16():
    """Of 1 and 3 steps with equal weights, the mean is 2."""
    payloads = {"params": {"w": jnp.ones((2, 1), jnp.bfloat16)}}
    uploads = {"params": {"w": jnp.asarray([[2], [4]], jnp.bfloat16)}}
    new = speeds.normalised(uploads, payloads, jnp.ones(2), jnp.array([1, 3]))["params"]["w"]
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new, [[3], [3]])


def test_equal_steps_give_fedavg_bit_for_bit():
    equal = Speeds(np.full(N, 3), step_seconds=1.0, deadline=3.0, partial_bytes=(12, 12))
    state, log = run_partial(equal)
    assert not log.late.any()
    uploads = {"params": {"w": W + 3 * DIRECTIONS}, "batch_stats": {"s": np.full(N, 3.0)}}
    kept = speeds.normalised(uploads, uploads, jnp.float32(EXAMPLES), jnp.full(N, 3))
    chex.assert_trees_all_equal(kept, uploads)
    mean = np.average(W + 3 * DIRECTIONS, 0, EXAMPLES)
    np.testing.assert_allclose(state.server["params"]["w"], mean, rtol=1e-6)
