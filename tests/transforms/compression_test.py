"""Compressed uploads: the encoder's arithmetic, error feedback, and the bill."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, State, Traffic
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.rounds import make_rounds
from fedjax_pfl.transforms.compression import Client, compression, encode, leaf_bytes
from tests import cases, tiny

KEY = jax.random.key(5)
X = np.float32([1.0, -0.37, 0.0, 0.123, -1.0, 0.7, 0.005, -0.9])


def encoded(x: np.ndarray, draws: int, bits: int | None, top_k: float | None) -> np.ndarray:
    every = jax.vmap(lambda key: encode(jnp.asarray(x), key, bits, top_k))
    return np.float64(jax.jit(every)(jax.random.split(KEY, draws)))


# The encoder


@pytest.mark.parametrize("bits", [2, 4, 16])
def test_quantised_values(bits: int):
    """On the grid of b bits, next to the true value, and right on the average."""
    draws, levels = 20_000, 2 ** (bits - 1) - 1
    sent = encoded(X, draws, bits, None) * levels  # the largest value is 1
    grid = np.round(sent)
    np.testing.assert_allclose(sent, grid, atol=1e-2 if bits > 8 else 1e-5)
    assert np.abs(grid).max() == levels
    exact = np.float64(X) * levels
    assert (np.abs(grid - exact) < 1 + 1e-2).all()
    spread = np.sqrt(0.25 / draws)  # of a mean of draws from two neighbours, at most
    assert np.abs(grid.mean(0) - exact).max() < 5 * spread + 1e-2
    assert (grid[:, [0, 2, 4]] == [levels, 0, -levels]).all()  # what is on the grid stays
    if bits == 4:
        assert set(grid[:, 1]) == {-3, -2}  # -.37 · 7 = -2.59


def test_a_change_of_nothing_stays_nothing():
    assert not encoded(0 * X, 2, 8, None).any()
    assert not encoded(0 * X, 2, 8, 0.25).any()


@pytest.mark.parametrize(("top_k", "kept"), [(0.25, 2), (0.3, 3), (0.01, 1), (1.0, 8)])
def test_the_largest_are_kept_as_they_are(top_k: float, kept: int):
    x = (X * np.linspace(1, 1.1, 8, dtype=np.float32)).reshape(2, 4)  # no ties
    (sent,) = encoded(x, 1, None, top_k)
    smallest = np.sort(np.abs(x).ravel())[-kept]
    np.testing.assert_array_equal(sent, np.where(np.abs(x) >= smallest, x, 0))
    assert (sent != 0).sum() == min(kept, 7)  # one of the eight is 0


def test_both_together():
    """3 of 8 values, in 4 bits: 1 and −1 are the ends of the grid, −.9 · 7 = −6.3."""
    sent = np.round(encoded(X, 50, 4, 0.3) * 7)
    assert (sent[:, [0, 4]] == [7, -7]).all()
    assert set(sent[:, 7]) == {-7, -6}
    assert not sent[:, [1, 2, 3, 5, 6]].any()


@pytest.mark.parametrize(
    ("size", "bits", "top_k", "wanted"),
    [
        (100, None, None, 400),
        (100, 8, None, 104),  # 100 · 8 + 32 bits
        (10, 3, None, 8),  # 62 bits
        (1, 16, None, 6),
        (100, None, 0.1, 80),  # 10 · (32 + 32) bits
        (10, None, 0.25, 24),  # 2.5 is 3 values
        (100, 8, 0.1, 54),  # 10 · (8 + 32) + 32 bits
        (7, 4, 0.01, 9),  # 4 + 32 + 32 bits
    ],
)
def test_bytes_by_hand(size: int, bits: int | None, top_k: float | None, wanted: int):
    assert leaf_bytes(size, bits, top_k) == wanted


# Error feedback

# What a client would change in each of three rounds: whole numbers, which float32 adds exactly.
CHANGES = np.float32([[8, -3, 1, 0], [1, -3, 2, 5], [-4, 1, 2, 1]])


def scripted() -> Algorithm:
    """Adds CHANGES[t]; a counter and a mask go up beside the model."""
    state = State({"w": jnp.zeros(4)}, (), jnp.arange(6))

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        new, t = {"w": payload["w"] + jnp.asarray(CHANGES)[ctx.t]}, ctx.t
        extra = {"count": 300 + jnp.asarray(t, jnp.int32), "mask": jnp.asarray([True, False])}
        return ClientResult({**new, **extra}, new, client + 1, {"loss": jnp.zeros(())})

    return Algorithm(
        init=lambda key, start=None: state if start is None else state._replace(clients=start[2]),
        send=lambda state, ctx: state.server,
        train=train,
        receive=lambda state, cohort: (state.server, state.rows),
        personalize=lambda state, client, ctx: client,
        predict=lambda variables, x: x,
    )


def script(**settings: Any) -> tuple[np.ndarray, list[np.ndarray], Client]:
    """(what was sent in each round, what is lost after each, the client at the end)."""
    data, federation = tiny.federated()
    algorithm = compression(federation, data, **settings)(scripted())
    client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)
    train = jax.jit(algorithm.train)
    sent, lost = [], []
    for t in range(3):
        payload = {"w": jnp.float32([16, 32, -16, 2]) * t}
        key = jax.random.fold_in(KEY, t)
        upload, trained, client, _ = train(payload, client, ClientContext(0, (), jnp.int32(t), key))
        np.testing.assert_array_equal(trained["w"], payload["w"] + CHANGES[t])
        assert (int(upload["count"]), upload["mask"].tolist()) == (300 + t, [True, False])
        assert (upload["count"].dtype, upload["mask"].dtype) == (jnp.int32, jnp.bool_)
        sent.append(np.asarray(upload["w"] - payload["w"]))
        lost.append(np.asarray(client.lost["w"]) if settings.get("feedback", True) else None)
    return np.array(sent), lost, client


def test_what_was_lost_is_sent_later():
    """The two largest of: 8 −3 1 0; 1 −3 3 5; −3 −2 5 1."""
    sent, lost, client = script(top_k=0.5)
    np.testing.assert_array_equal(sent[0], [8, -3, 0, 0])
    np.testing.assert_array_equal(lost[0], [0, 0, 1, 0])
    np.testing.assert_array_equal(sent.sum(0) + lost[2], CHANGES.sum(0))
    assert sent[1][3] == 5
    assert (sent != 0).sum() == 6
    assert (lost[2] != 0).any()
    assert int(client.method) == 3
    assert not client.lost["count"].any()
    assert not client.lost["mask"].any()


def test_quantised_changes_telescope_too():
    sent, lost, _ = script(bits=3)
    np.testing.assert_allclose(sent.sum(0) + lost[2], CHANGES.sum(0), rtol=0, atol=1e-5)
    assert all(np.abs(rest).max() <= 4 for rest in lost)  # one level of three, of at most 12
    assert any(np.abs(rest).max() > 0.1 for rest in lost)


def test_without_feedback_it_is_gone():
    sent, _, client = script(top_k=0.5, feedback=False)
    np.testing.assert_array_equal(sent, [[8, -3, 0, 0], [0, -3, 0, 5], [-4, 0, 2, 0]])
    assert client.lost == ()


def test_the_state_of_a_compressed_algorithm():
    """Every client has nothing lost at first; a later phase starts from its own state."""
    data, federation = tiny.federated()
    algorithm = compression(federation, data, bits=8)(scripted())
    state = algorithm.init(KEY)
    np.testing.assert_array_equal(state.clients.method, np.arange(6))
    shapes = {name: leaf.shape for name, leaf in state.clients.lost.items()}
    assert shapes == {"w": (6, 4), "count": (6,), "mask": (6, 2)}
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.clients.lost))
    later = state._replace(clients=state.clients._replace(method=7 + state.clients.method))
    again = algorithm.init(KEY, later)
    chex.assert_trees_all_equal(again, later)
    client = Client(jnp.int32(3), ())
    assert (
        algorithm.personalize(State(state.server, (), ()), client, ClientContext(0, (), 0, KEY))
        == 3
    )
    pair = compression(federation, data, bits=8)(by_group((scripted(), scripted())))
    both = pair.init(KEY)
    assert [len(both.clients), len(pair.train), len(pair.traffic)] == [2, 2, 2]
    chex.assert_trees_all_equal(both.clients[1], state.clients)


# The bill


def test_the_bill_of_one_visit():
    """w: 4 · 8 + 32 bits; the counter and the mask as they are."""
    data, federation = tiny.federated()
    algorithm = compression(federation, data, bits=8)(scripted())
    upload = {"w": jnp.zeros(4), "count": jnp.int32(1), "mask": jnp.zeros(2, bool)}
    bill = algorithm.traffic({"w": jnp.zeros(4)}, upload)
    assert bill == Traffic({"w": 16}, {"w": 8, "count": 4, "mask": 2})


def test_a_part_of_a_layer():
    """Where 12 of 16 raw bytes travel, 3/4 of the packed ones do; where none do, none."""
    data, federation = tiny.federated()
    half = scripted()._replace(traffic=lambda payload, upload: Traffic({}, {"w": upload["bytes"]}))
    algorithm = compression(federation, data, bits=8)(half)
    for raw, packed in ((12, 6), (16, 8), (0, 0), (1, 1)):
        up = algorithm.traffic((), {"w": jnp.zeros(4), "bytes": jnp.int32(raw)}).up
        assert int(up["w"]) == packed
    fixed = half._replace(traffic=lambda payload, upload: Traffic({}, {"w": 12}))
    up = compression(federation, data, bits=8)(fixed).traffic((), {"w": jnp.zeros(4)}).up
    assert up == {"w": 6}


def step(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    """In place of training, which takes long to compile: a step that depends on the data."""
    data = ctx.data
    mean = jnp.mean(data.x[data.train.rows])
    new = jax.tree.map(lambda leaf: leaf + mean * jnp.cos(7 * leaf), payload)
    return ClientResult(new, new, client, {"loss": mean})


def test_a_round_of_fedavg():
    """16 bits: as the plain round but for one level; kernel 10 · 16 + 32 bits, bias 2 · 16 + 32."""
    data, federation = tiny.federated()
    federation = federation._replace(task=tiny.HALF_SQUARES)
    network = MLP(2, ())
    plain = algorithms.fedavg(network, local_training.sgd(epochs=1), federation)
    plain = plain._replace(train=step)
    packed = compression(federation, data, bits=16, top_k=None)(plain)

    def ran(algorithm: Algorithm) -> Any:
        rounds = make_rounds(algorithm, federation, cohort=6)
        first = jax.device_get(rounds.init(KEY))
        state, logs = rounds.run(KEY, rounds.init(KEY), data, jnp.int32(0), jnp.int32(1))
        book = ledger.add(ledger.empty(6), jax.device_get(logs), 1)
        return first.server["params"]["fc1"], jax.device_get(state), book

    first, wanted, raw = ran(plain)
    same, got, book = ran(packed)
    chex.assert_trees_all_equal(same, first)
    means = [np.asarray(data.x)[rows].mean() for rows in np.asarray(data.train.rows)]
    for name, leaf in wanted.server["params"]["fc1"].items():
        moved = np.max(np.abs(means)) * np.abs(np.cos(7 * first[name])).max()
        error = np.abs(got.server["params"]["fc1"][name] - leaf)
        assert 0 < error.max() <= moved / (2**15 - 1) + 1e-6
        assert np.abs(leaf - first[name]).max() > 0.01
        assert got.clients.lost["params"]["fc1"][name].any()
    assert (raw.down, raw.up) == ({"fc1": 48 * 6}, {"fc1": 48 * 6})
    assert (book.down, book.up) == ({"fc1": 48 * 6}, {"fc1": (24 + 8) * 6})
    assert book.client_up == [32] * 6


@pytest.mark.slow("two runs")
def test_training_draws_the_same_batches_as_without_compression():
    """FedAvg's first round: the same loss to the last bit, and the same model but for rounding."""
    data, federation = tiny.federated()
    plain = cases.make("fedavg", federation)
    small = compression(federation, data, bits=16)(plain)
    results = []
    for algorithm in (plain, small):
        rounds = make_rounds(algorithm, federation, cohort=tiny.CLIENTS)
        key, zero, one = jax.random.key(0), jnp.int32(0), jnp.int32(1)
        state, (log,) = rounds.run(key, rounds.init(key), data, zero, one)
        results.append((state.server, np.asarray(log.metrics["loss"])))
    np.testing.assert_array_equal(results[0][1], results[1][1])
    chex.assert_trees_all_close(results[0][0], results[1][0], atol=1e-3)
