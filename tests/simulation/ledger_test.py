"""Tests of traffic: sums beyond 32 bits, bytes per client and closed formulas."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientResult, Federation
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.records import Log
from fedjax_pfl.simulation.rounds import make_rounds
from tests import tiny

KEY = jax.random.key(0)
BIG = 2_000_000_000
IDS = [[0, 2], [0, 1], [1, 2]]  # rounds x slots


def log(down, up, ids=IDS, present=True, dropped=False, rejected=False) -> Log:
    """Returns a log of rounds x slots, with bytes by layer."""
    ids = np.array(ids, np.int32)
    flags = [np.broadcast_to(np.array(f, bool), ids.shape) for f in (present, dropped, rejected)]
    traffic = [
        {layer: np.broadcast_to(np.int32(count), ids.shape) for layer, count in layers.items()}
        for layers in (down, up)
    ]
    return Log(ids, *flags, {}, *traffic)


def book_of(logs, rounds=3, clients=3, **options):
    return ledger.add(ledger.empty(clients), logs, rounds, **options)


def test_totals_beyond_32_bits():
    """Sums 3 rounds x 2 clients x 2e9 bytes down, and the largest int32 per entry up."""
    logs = [log({"fc1": BIG}, {"fc1": 2**31 - 1, "fc2": 1})]
    book = book_of(logs, clients=4)
    assert (book.total_down, book.total_up) == (12_000_000_000, 6 * 2**31)
    assert book.down == {"fc1": 12_000_000_000}
    assert book.up == {"fc1": 6 * (2**31 - 1), "fc2": 6}
    assert book.client_down == [2 * BIG, 2 * BIG, 2 * BIG, 0]
    assert book.client_up == [2**32, 2**32, 2**32, 0]
    twice = ledger.add(book, logs, 3)
    assert twice.total_down == 24_000_000_000
    assert book.total_down == 12_000_000_000  # unchanged
    assert all(
        type(n) is int for n in (*twice.down.values(), *twice.client_up, *twice.client_updates)
    )
    assert ledger.from_json(json.loads(json.dumps(twice._asdict()))) == twice


def test_only_completed_rounds_count():
    book = book_of([log({"fc": 1}, {"fc": 10})], rounds=2)
    assert (book.client_down, book.client_up) == ([2, 1, 1], [20, 10, 10])
    assert book.client_updates == [2, 1, 1]


def test_only_the_download_of_a_free_round_is_free():
    logs = [log({"fc": 1}, {"fc": 10})]
    book = book_of(logs, free_rounds=1)
    assert (book.down, book.up) == ({"fc": 4}, {"fc": 60})
    assert (book.client_down, book.client_up) == ([1, 2, 1], [20, 20, 20])
    assert book.client_updates == [2, 2, 2]
    single = book_of(logs, rounds=1, free_rounds=1)
    assert (single.total_down, single.total_up) == (0, 20)


def test_dropped_rejected_and_empty_slots():
    """A dropped client has downloaded, and a rejected upload was sent; an empty slot is free."""
    present = [[1, 1], [1, 1], [1, 0]]
    dropped = [[1, 0], [0, 0], [0, 0]]
    rejected = [[0, 0], [0, 1], [0, 0]]
    down = np.where(present, 7, 0)
    up = np.where(np.array(present) & ~np.array(dropped, bool), 5, 0)
    logs = [log({"fc": down}, {"fc": up}, IDS, present, dropped, rejected)]
    book = book_of(logs)
    assert book.client_down == [14, 14, 7]
    assert book.client_up == [5, 10, 5]
    assert (book.client_updates, book.dropped, book.rejected) == ([1, 1, 1], [1, 0, 0], [0, 1, 0])


def test_a_client_may_take_several_slots_of_a_call():
    book = book_of([log({"fc": BIG}, {}, [[1], [1], [1], [0]])], rounds=4, clients=2)
    assert book.client_down == [BIG, 3 * BIG]


def test_layers_with_one_name_in_two_groups_are_added():
    logs = [
        log({"fc1": 3, "fc2": 4}, {"fc1": 3}, [[0], [1]]),
        log({"fc1": 30, "wide": 50}, {"fc1": 30}, [[2], [3]]),
    ]
    book = book_of(logs, rounds=2, clients=4)
    assert book.down == {"fc1": 66, "fc2": 8, "wide": 100}
    assert book.up == {"fc1": 66}
    assert (book.client_down, book.client_up) == ([7, 7, 80, 80], [3, 3, 30, 30])
    assert book.client_updates == [1, 1, 1, 1]


def simulate(algorithm: Algorithm, federation: Federation, rounds: int) -> ledger.Ledger:
    """Returns the traffic of rounds of all clients, which upload their download."""

    def train(payload, client, ctx):
        return ClientResult(payload, payload, client, {"loss": jnp.zeros(())})

    cohort = len(federation.counts)
    compiled = make_rounds(
        algorithm._replace(train=train), federation, cohort=cohort, max_rounds=rounds
    )
    data = tiny.federated()[0]
    _, logs = compiled.run(KEY, compiled.init(KEY), data, jnp.int32(0), jnp.int32(rounds))
    return book_of(jax.device_get(logs), rounds, federation.clients)


def test_published_traffic_of_fedavg():
    """Counts pFedLA's Table 3, EMNIST: 10 clients x 75 rounds x 85,822 x 4 bytes, in MiB."""
    ones = np.ones(10, int)
    federation = Federation(ones, (28, 28, 1), 10, ones > 0, 0 * ones)
    algorithm = algorithms.fedavg(LeNet(), local_training.sgd(epochs=1), federation)

    def zeros(key, start):
        shapes = jax.eval_shape(algorithm.init, key)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    book = simulate(algorithm._replace(init=zeros), federation, 75)
    assert book.total_down == book.total_up == 10 * 75 * 85_822 * 4
    assert round((book.total_down + book.total_up) / 2**20, 2) == 491.08
    layers = {"conv1": 416, "conv2": 12_832, "fc1": 61_560, "fc2": 10_164, "fc3": 850}
    assert book.down == book.up == {name: n * 4 * 750 for name, n in layers.items()}
    assert book.client_down == [75 * 85_822 * 4] * 10


def test_local_has_no_traffic():
    _, federation = tiny.federated()
    training = local_training.sgd(steps=1)
    book = simulate(algorithms.local(MLP(3, ()), training, federation), federation, 2)
    assert (book.total_down, book.total_up, sum(book.client_down + book.client_up)) == (0, 0, 0)
    assert book.client_updates == [2] * 6
