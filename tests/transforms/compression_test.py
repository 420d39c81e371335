"""Tests of compressed uploads: encoder, error feedback and traffic."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, State, Traffic
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.rounds import make_rounds
from fedjax_pfl.transforms.compression import Client, compression, encode, leaf_bytes
from tests import tiny

KEY = jax.random.key(5)
X = np.float32([1.0, -0.37, 0.0, 0.123, -1.0, 0.7, 0.005, -0.9])


def encode_repeatedly(
    x: np.ndarray, repeats: int, bits: int | None, top_k: float | None
) -> np.ndarray:
    """Returns `repeats` encodings of `x`, stacked, with different keys."""
    encode_all = jax.vmap(lambda key: encode(jnp.asarray(x), key, bits, top_k))
    return np.float64(jax.jit(encode_all)(jax.random.split(KEY, repeats)))


# The encoder


@pytest.mark.parametrize("bits", [2, 4, 16])
def test_quantised_values_are_unbiased_grid_points(bits: int):
    repeats, levels = 20_000, 2 ** (bits - 1) - 1
    sent = encode_repeatedly(X, repeats, bits, None) * levels  # the largest value is 1
    grid = np.round(sent)
    np.testing.assert_allclose(sent, grid, atol=1e-2 if bits > 8 else 1e-5)
    assert np.abs(grid).max() == levels
    exact = np.float64(X) * levels
    assert (np.abs(grid - exact) < 1 + 1e-2).all()
    deviation = np.sqrt(0.25 / repeats)  # largest, of a mean over two neighbouring levels
    assert np.abs(grid.mean(0) - exact).max() < 5 * deviation + 1e-2
    assert (grid[:, [0, 2, 4]] == [levels, 0, -levels]).all()  # exact values stay
    if bits == 4:
        assert set(grid[:, 1]) == {-3, -2}  # -0.37 · 7 = -2.59
        # 3 of 8 values: 1 and −1 are the ends of the grid, −0.9 · 7 = −6.3.
        sent = np.round(encode_repeatedly(X, 50, 4, 0.3) * 7)
        assert (sent[:, [0, 4]] == [7, -7]).all()
        assert set(sent[:, 7]) == {-7, -6}
        assert not sent[:, [1, 2, 3, 5, 6]].any()
        assert not encode_repeatedly(0 * X, 2, bits, 0.25).any()


@pytest.mark.parametrize(("top_k", "count"), [(0.25, 2), (0.3, 3), (0.01, 1), (1.0, 8)])
def test_top_k_sends_the_largest_values_unchanged(top_k: float, count: int):
    x = (X * np.linspace(1, 1.1, 8, dtype=np.float32)).reshape(2, 4)  # no ties
    (sent,) = encode_repeatedly(x, 1, None, top_k)
    smallest = np.sort(np.abs(x).ravel())[-count]
    np.testing.assert_array_equal(sent, np.where(np.abs(x) >= smallest, x, 0))
    assert (sent != 0).sum() == min(count, 7)  # one of the eight is 0


@pytest.mark.parametrize(
    ("size", "bits", "top_k", "expected"),
    [
        (100, None, None, 400),
        (100, 8, None, 104),  # 100 · 8 + 32 bits
        (10, 3, None, 8),  # 62 bits
        (1, 16, None, 6),
        (100, None, 0.1, 80),  # 10 · (32 + 32) bits
        (10, None, 0.25, 24),  # 2.5 is 3 values
        (100, 8, 0.1, 54),  # 10 · (8 + 32) + 32 bits
        (7, 4, 0.01, 9),  # 4 + 32 + 32 bits
        (100, None, 0.07, 56),  # 0.07 · 100 is more than 7 in float64
    ],
)
def test_leaf_bytes(size: int, bits: int | None, top_k: float | None, expected: int):
    assert leaf_bytes(size, bits, top_k) == expected


# Error feedback

# Change of a client in each of three rounds. Float32 adds whole numbers exactly.
CHANGES = np.float32([[8, -3, 1, 0], [1, -3, 2, 5], [-4, 1, 2, 1]])


def scripted() -> Algorithm:
    """Returns a method that adds CHANGES[t] and also uploads a counter and a mask."""
    state = State({"params": {"w": jnp.zeros(4)}}, (), jnp.arange(6))

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        t = ctx.t
        new = {"params": {"w": payload["params"]["w"] + jnp.asarray(CHANGES)[t]}}
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


def script(
    kept_change: float = 0.0, **settings: Any
) -> tuple[np.ndarray, list[np.ndarray], Client]:
    """Returns the changes sent in each round, the error after each, and the last client state."""
    data, federation = tiny.federated()
    method = scripted()._replace(kept_change=kept_change)
    algorithm = compression(federation, data, **settings)(method)
    client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)
    train = jax.jit(algorithm.train)
    sent, lost = [], []
    for t in range(3):
        w = jnp.float32([16, 32, -16, 2]) * t
        payload = {"params": {"w": w}}
        key = jax.random.fold_in(KEY, t)
        upload, variables, client, _ = train(
            payload, client, ClientContext(0, (), jnp.int32(t), key)
        )
        np.testing.assert_array_equal(variables["params"]["w"], w + CHANGES[t])
        assert (int(upload["count"]), upload["mask"].tolist()) == (300 + t, [True, False])
        assert (upload["count"].dtype, upload["mask"].dtype) == (jnp.int32, jnp.bool_)
        sent.append(np.asarray(upload["params"]["w"] - w))
        lost.append(np.asarray(client.lost["params"]["w"]) if client.lost else None)
    return np.array(sent), lost, client


def test_error_feedback_sends_the_error_later():
    """The two largest values of 8 −3 1 0, then of 1 −3 3 5, then of −3 −2 5 1."""
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


def test_an_error_that_the_next_change_contains_is_not_added():
    """With 0.5 the second round compresses 1 −3 2.5 5, with 1 the given changes."""
    sent, lost, _ = script(0.5, top_k=0.5)
    np.testing.assert_array_equal(sent[:2], [[8, -3, 0, 0], [0, -3, 0, 5]])
    np.testing.assert_array_equal(lost[1], [1, 0, 2.5, 0])
    sent, _, client = script(1.0, top_k=0.5)
    np.testing.assert_array_equal(sent, [[8, -3, 0, 0], [0, -3, 0, 5], [-4, 0, 2, 0]])
    assert client.lost == ()


def test_the_error_of_rounding_to_2_bits_is_dropped():
    _, lost, _ = script(bits=2)
    assert not np.any(lost)
    sent, lost, _ = script(bits=2, top_k=0.5)
    np.testing.assert_array_equal(lost[0], [0, 0, 1, 0])  # of sparsification alone
    assert set(sent[0]) <= {-8, 0, 8}


def test_quantised_changes_and_the_error_sum_to_all_changes():
    sent, lost, _ = script(bits=3)
    np.testing.assert_allclose(sent.sum(0) + lost[2], CHANGES.sum(0), rtol=0, atol=1e-5)
    assert all(np.abs(error).max() <= 4 for error in lost)  # one of three levels, of at most 12
    assert any(np.abs(error).max() > 0.1 for error in lost)
    # Without feedback the error is dropped.
    sent, _, client = script(top_k=0.5, feedback=False)
    np.testing.assert_array_equal(sent, [[8, -3, 0, 0], [0, -3, 0, 5], [-4, 0, 2, 0]])
    assert client.lost == ()


def test_a_layer_that_is_not_uploaded_keeps_its_error():
    """In round 1 nothing of w is uploaded. Round 2 adds the error of round 0: −4 1 3 1."""
    data, federation = tiny.federated()

    def traffic(payload: Any, upload: Any) -> Traffic:
        return Traffic({}, {"w": jnp.where(upload["count"] == 301, 0, 16)})

    algorithm = compression(federation, data, top_k=0.5)(scripted()._replace(traffic=traffic))
    client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)
    for t, lost in enumerate(([0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 1])):
        ctx = ClientContext(0, (), jnp.int32(t), KEY)
        client = algorithm.train({"params": {"w": jnp.zeros(4)}}, client, ctx).client
        np.testing.assert_array_equal(client.lost["params"]["w"], lost)


def test_the_error_includes_the_rounding_of_bfloat16():
    """Around 64, numbers in bfloat16 are 0.5 apart."""
    data, federation = tiny.federated()
    old = {"params": {"w": jnp.full(4, 64, jnp.bfloat16)}}
    change = jnp.asarray(CHANGES[0], jnp.bfloat16)

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        new = {"params": {"w": payload["params"]["w"] + change}}
        return ClientResult(new, new, client, {"loss": jnp.zeros(())})

    first = State(old, (), jnp.arange(6))
    method = scripted()._replace(init=lambda key, start=None: first, train=train)
    algorithm = compression(federation, data, bits=3)(method)
    client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)
    result = algorithm.train(old, client, ClientContext(0, (), jnp.int32(0), KEY))
    sent = np.float32(result.upload["params"]["w"]) - 64
    lost = np.float32(result.client.lost["params"]["w"])
    np.testing.assert_array_equal(sent + lost, CHANGES[0])
    assert (sent % 1).any()


@pytest.mark.parametrize("settings", [{"bits": 8}, {"top_k": 0.5}])
def test_arrays_without_elements_are_sent_as_they_are(settings: dict[str, Any]):
    """A layer of no units has such weights."""
    data, federation = tiny.federated()
    old = {"params": {"a": {"w": jnp.zeros((0, 3))}, "b": {"w": jnp.ones(2)}}}
    method = scripted()._replace(
        init=lambda key, start=None: State(old, (), jnp.arange(6)),
        train=lambda payload, client, ctx: ClientResult(payload, payload, client, {}),
    )
    algorithm = compression(federation, data, **settings)(method)
    client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)
    upload = algorithm.train(old, client, ClientContext(0, (), 0, KEY)).upload
    chex.assert_trees_all_equal(upload, old)
    assert algorithm.traffic(old, upload).up["a"] == 0


def test_values_that_are_computed_anew_are_sent_as_they_are():
    """Each sent entry is the value or 0; a change that the server adds catches up instead."""
    data, federation = tiny.federated()
    value = jnp.asarray(X)

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        upload = {"means": {"c": value}, "control_change": {"c": value}}
        return ClientResult(upload, payload, client, {"loss": jnp.zeros(())})

    algorithm = compression(federation, data, top_k=0.25)(scripted()._replace(train=train))
    client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)
    sums = {"means": np.zeros(len(X)), "control_change": np.zeros(len(X))}
    for t in range(8):
        ctx = ClientContext(0, (), jnp.int32(t), KEY)
        upload, _, client, _ = algorithm.train({"params": {"w": jnp.zeros(4)}}, client, ctx)
        np.testing.assert_array_equal(upload["means"]["c"], np.where(np.abs(X) == 1, X, 0))
        for name in sums:
            sums[name] += np.asarray(upload[name]["c"])
    assert np.abs(sums["control_change"] - 8 * X).max() < 4
    assert np.abs(sums["means"] - 8 * X).max() > 7


def test_the_error_of_a_layer_that_stays_on_the_client_is_not_added():
    """An upload, the mean of the server's head and the client's, has one of ten values changed."""
    data, federation = tiny.federated()
    own = jnp.linspace(1.0, 2.0, 20)

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        new = jax.tree.map(lambda head: (head + own) / 2, payload)
        return ClientResult(new, new, client, {"loss": jnp.zeros(())})

    def distance(share: Any) -> float:
        server = {"params": {"head": {"w": jnp.zeros(20)}}}
        state = State(server, (), jnp.arange(6))
        method = scripted()._replace(init=lambda *_: state, train=train, kept_change=share)
        algorithm = compression(federation, data, top_k=0.1)(method)
        client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)
        step, ctx = jax.jit(algorithm.train), ClientContext(0, (), jnp.int32(0), KEY)
        for _ in range(60):
            server, _, client, _ = step(server, client, ctx)
        return float(jnp.abs(server["params"]["head"]["w"] - own).max())

    shares = {"head": 1.0}, lambda payload, client, ctx: (client == 0).astype(float)
    assert max(map(distance, shares)) < 0.1
    assert distance({"body": 1.0}) > 10


def test_init_restarts_the_error_and_continues_the_method():
    data, federation = tiny.federated()
    algorithm = compression(federation, data, bits=8)(scripted())
    state = algorithm.init(KEY)
    np.testing.assert_array_equal(state.clients.method, np.arange(6))
    shapes = jax.tree.map(jnp.shape, state.clients.lost)
    assert shapes == {"params": {"w": (6, 4)}, "count": (6,), "mask": (6, 2)}
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.clients.lost))
    later = state._replace(clients=state.clients._replace(method=7 + state.clients.method))
    again = algorithm.init(KEY, later)
    chex.assert_trees_all_equal(again, later)
    client, ctx = Client(jnp.int32(3), ()), ClientContext(0, (), 0, KEY)
    assert algorithm.personalize(State(state.server, (), ()), client, ctx) == 3
    members = by_group((scripted(), scripted()._replace(kept_change=1)))
    pair = compression(federation, data, bits=8)(members)
    pair_state = pair.init(KEY)
    assert [len(pair_state.clients), len(pair.train), len(pair.traffic)] == [2, 2, 2]
    chex.assert_trees_all_equal(pair_state.clients[0], state.clients)
    assert pair_state.clients[1].lost == ()


def test_variances_do_not_become_negative():
    """With three levels, −0.9 is sent as −5/3 or 0, and a variance of 1 cannot fall by 5/3."""
    data, federation = tiny.federated()
    old = {"batch_stats": {"norm": {"mean": jnp.ones(2), "var": jnp.ones(2)}}}
    change = np.float32([-0.9, 5])

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        new = jax.tree.map(lambda leaf: leaf + jnp.asarray(change), payload)
        return ClientResult(new, new, client, {"loss": jnp.zeros(())})

    method = scripted()._replace(
        init=lambda key, start=None: State(old, (), jnp.arange(6)), train=train
    )
    algorithm = compression(federation, data, bits=3)(method)
    client = jax.tree.map(lambda leaf: leaf[0], algorithm.init(KEY).clients)

    def upload(key: jax.Array) -> Any:
        result = algorithm.train(old, client, ClientContext(0, (), jnp.int32(0), key))
        return result.upload, result.client.lost

    sent, lost = jax.jit(jax.vmap(upload))(jax.random.split(KEY, 50))
    sent, lost = (jax.device_get(tree["batch_stats"]["norm"]) for tree in (sent, lost))
    np.testing.assert_allclose(np.unique(sent["mean"][:, 0]), [-2 / 3, 1], rtol=1e-6)
    assert set(np.unique(sent["var"][:, 0])) == {0, 1}
    for name in ("mean", "var"):
        total = np.broadcast_to(1 + change, sent[name].shape)
        np.testing.assert_allclose(sent[name] + lost[name], total, rtol=1e-5)


# Traffic


def test_traffic():
    """w takes 4 · 8 + 32 bits; a method that sends 12 of 16 bytes sends 3/4 of these bytes."""
    data, federation = tiny.federated()
    algorithm = compression(federation, data, bits=8)(scripted())
    upload = {"w": jnp.zeros(4), "count": jnp.int32(1), "mask": jnp.zeros(2, bool)}
    traffic = algorithm.traffic({"w": jnp.zeros(4)}, upload)
    assert traffic == Traffic({"w": 16}, {"w": 8, "count": 4, "mask": 2})
    half = scripted()._replace(traffic=lambda payload, upload: Traffic({}, {"w": upload["bytes"]}))
    algorithm = compression(federation, data, bits=8)(half)
    for full, compressed in ((12, 6), (16, 8), (0, 0), (1, 1)):
        up = algorithm.traffic((), {"w": jnp.zeros(4), "bytes": jnp.int32(full)}).up
        assert int(up["w"]) == compressed
    narrow = compression(federation, data, top_k=0.5)(scripted())
    up = narrow.traffic((), {"w": jnp.zeros(4, jnp.bfloat16)}).up
    assert up == {"w": 12}  # two values of 16 bits and two indices
    fixed = half._replace(traffic=lambda payload, upload: Traffic({}, {"w": 12}))
    up = compression(federation, data, bits=8)(fixed).traffic((), {"w": jnp.zeros(4)}).up
    assert up == {"w": 6}
    renamed = half._replace(traffic=lambda payload, upload: Traffic({}, {"model": 16}))
    up = compression(federation, data, bits=8)(renamed).traffic((), {"w": jnp.zeros(4)}).up
    assert up == {"model": 16, "w": 0}  # every byte counts, also without a layer's name


def step(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    """Replaces training, which is slow to compile, by a step that depends on the data."""
    data = ctx.data
    mean = jnp.mean(data.x[data.train.rows])
    new = jax.tree.map(lambda leaf: leaf + mean * jnp.cos(7 * leaf), payload)
    return ClientResult(new, new, client, {"loss": mean})


def test_arguments_out_of_range_are_refused():
    data, federation = tiny.federated()
    with pytest.raises(UsageError, match="bits is 1; it must be 2 to 16"):
        compression(federation, data, bits=1)
    with pytest.raises(UsageError, match="top_k is 0; it is a fraction, above 0, to 1"):
        compression(federation, data, top_k=0)


def test_fedavg_round_differs_by_at_most_one_level():
    """At 16 bits the kernel takes 10 · 16 + 32 bits and the bias 2 · 16 + 32."""
    data, federation = tiny.federated()
    federation = federation._replace(task=tiny.HALF_SQUARES)
    network = MLP(2, ())
    fedavg = algorithms.fedavg(network, local_training.sgd(epochs=1), federation)
    fedavg = fedavg._replace(train=step)
    stored = jax.tree.map(np.asarray, data)  # as from `partition`
    compressed = compression(federation, stored, bits=16, top_k=None)(fedavg)

    def run(algorithm: Algorithm) -> Any:
        rounds = make_rounds(algorithm, federation, cohort=6)
        first = jax.device_get(rounds.init(KEY))
        state, logs = rounds.run(KEY, rounds.init(KEY), data, jnp.int32(0), jnp.int32(1))
        totals = ledger.add(ledger.empty(6), jax.device_get(logs), 1)
        return first.server["params"]["fc1"], jax.device_get(state), totals

    first, plain_state, plain_ledger = run(fedavg)
    compressed_first, state, compressed_ledger = run(compressed)
    chex.assert_trees_all_equal(compressed_first, first)
    means = [np.asarray(data.x)[rows].mean() for rows in np.asarray(data.train.rows)]
    for name, leaf in plain_state.server["params"]["fc1"].items():
        change = np.max(np.abs(means)) * np.abs(np.cos(7 * first[name])).max()
        error = np.abs(state.server["params"]["fc1"][name] - leaf)
        assert 0 < error.max() <= change / (2**15 - 1) + 1e-6
        assert np.abs(leaf - first[name]).max() > 0.01
        assert state.clients.lost["params"]["fc1"][name].any()
    assert plain_ledger.down == plain_ledger.up == compressed_ledger.down == {"fc1": 48 * 6}
    assert compressed_ledger.up == {"fc1": (24 + 8) * 6}
    assert compressed_ledger.client_up == [32] * 6
