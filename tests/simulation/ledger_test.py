"""Bytes: sums that 32 bits do not hold, who pays for them, and closed formulas."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientResult, Federation
from fedjax_pfl.core.task import classification
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.simulation import ledger
from fedjax_pfl.simulation.records import CompiledRounds, Log
from fedjax_pfl.simulation.rounds import make_rounds
from tests import tiny

TASK = classification()
KEY = jax.random.key(0)
BIG = 2_000_000_000


def log(ids, down, up, present=True, dropped=False, rejected=False) -> Log:
    """Rounds x slots, as one call of `CompiledRounds.run` returns them."""
    ids = np.array(ids, np.int32)
    flags = [np.broadcast_to(np.array(f, bool), ids.shape) for f in (present, dropped, rejected)]
    bills = [
        {
            layer: np.broadcast_to(np.array(amount, np.int32), ids.shape)
            for layer, amount in bill.items()
        }
        for bill in (down, up)
    ]
    return Log(ids, *flags, {}, *bills)


IDS = [[0, 2], [0, 1], [1, 2]]


def test_totals_beyond_32_bits():
    """3 rounds x 2 clients x 2e9 bytes down, and a layer at the limit of one entry up."""
    logs = [log(IDS, {"fc1": BIG}, {"fc1": 2**31 - 1, "fc2": 1})]
    book = ledger.add(ledger.empty(4), logs, 3)
    assert (book.total_down, book.total_up) == (12_000_000_000, 6 * 2**31)
    assert book.down == {"fc1": 12_000_000_000}
    assert book.up == {"fc1": 6 * (2**31 - 1), "fc2": 6}
    assert book.client_down == [2 * BIG, 2 * BIG, 2 * BIG, 0]
    assert book.client_up == [2**32, 2**32, 2**32, 0]
    more = ledger.add(book, logs, 3)
    assert more.total_down == 24_000_000_000
    assert book.total_down == 12_000_000_000  # the earlier one is as it was
    assert all(type(n) is int for n in (*more.down.values(), *more.client_up, *more.visits))


def test_only_the_rounds_that_ran_count():
    book = ledger.add(ledger.empty(3), [log(IDS, {"fc": 1}, {"fc": 10})], 2)
    assert (book.client_down, book.client_up) == ([2, 1, 1], [20, 10, 10])
    assert book.visits == [2, 1, 1]


def test_free_first_round():
    """The download of round 0 is free; its upload, its visits and all that follows are not."""
    logs = [log(IDS, {"fc": 1}, {"fc": 10})]
    book = ledger.add(ledger.empty(3), logs, 3, free_rounds=1)
    assert (book.down, book.up) == ({"fc": 4}, {"fc": 60})
    assert (book.client_down, book.client_up) == ([1, 2, 1], [20, 20, 20])
    assert book.visits == [2, 2, 2]
    alone = ledger.add(ledger.empty(3), logs, 1, free_rounds=1)
    assert (alone.total_down, alone.total_up) == (0, 20)


def test_what_happened_to_each_client():
    """A dropped client downloaded; a rejected answer was sent; an empty seat is nobody's."""
    present = [[1, 1], [1, 1], [1, 0]]
    dropped = [[1, 0], [0, 0], [0, 0]]
    rejected = [[0, 0], [0, 1], [0, 0]]
    down = np.where(present, 7, 0)
    up = np.where(np.array(present) & ~np.array(dropped, bool), 5, 0)
    book = ledger.add(
        ledger.empty(3), [log(IDS, {"fc": down}, {"fc": up}, present, dropped, rejected)], 3
    )
    assert book.client_down == [14, 14, 7]
    assert book.client_up == [5, 10, 5]
    assert (book.visits, book.dropped, book.rejected) == ([1, 1, 1], [1, 0, 0], [0, 1, 0])


def test_a_client_may_sit_in_several_slots_of_a_call():
    book = ledger.add(ledger.empty(2), [log([[1], [1], [1], [0]], {"fc": BIG}, {})], 4)
    assert book.client_down == [BIG, 3 * BIG]


def test_groups_share_the_names_of_layers():
    logs = [
        log([[0], [1]], {"fc1": 3, "fc2": 4}, {"fc1": 3}),
        log([[2], [3]], {"fc1": 30, "wide": 50}, {"fc1": 30}),
    ]
    book = ledger.add(ledger.empty(4), logs, 2)
    assert book.down == {"fc1": 66, "fc2": 8, "wide": 100}
    assert book.up == {"fc1": 66}
    assert (book.client_down, book.client_up) == ([7, 7, 80, 80], [3, 3, 30, 30])
    assert book.visits == [1, 1, 1, 1]


def test_json_holds_it():
    book = ledger.add(ledger.empty(3), [log(IDS, {"fc": BIG}, {"fc": BIG})], 3)
    back = ledger.from_json(json.loads(json.dumps(book._asdict())))
    assert back == book
    assert back.total_up == 6 * BIG


def idle(payload, client, ctx):
    return ClientResult(payload, payload, client, {"loss": jnp.zeros(())})


def ran(algorithm: Algorithm, federation: Federation, rounds: int, **settings) -> ledger.Ledger:
    compiled: CompiledRounds = make_rounds(
        algorithm, federation, cohort=len(federation.counts), max_rounds=rounds, **settings
    )
    data = tiny.federated()[0]
    logs = compiled.run(KEY, compiled.init(KEY), data, jnp.int32(0), jnp.int32(rounds))[1]
    return ledger.add(ledger.empty(federation.clients), jax.device_get(logs), rounds)


def test_published_traffic_of_fedavg():
    """pFedLA's Table 3, EMNIST: 10 clients x 75 rounds x 85,822 x 4 bytes, both ways, in MiB."""
    ones = np.ones(10, int)
    federation = Federation(ones, (28, 28, 1), 10, ones > 0, 0 * ones)
    algorithm = algorithms.fedavg(LeNet(), local_training.sgd(epochs=1), federation)

    def nothing(key, start):
        return jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(algorithm.init, key)
        )

    book = ran(algorithm._replace(train=idle, init=nothing), federation, 75)
    assert book.total_down == book.total_up == 10 * 75 * 85_822 * 4
    assert round((book.total_down + book.total_up) / 2**20, 2) == 491.08
    layers = {"conv1": 416, "conv2": 12_832, "fc1": 61_560, "fc2": 10_164, "fc3": 850}
    assert book.down == book.up == {name: n * 4 * 750 for name, n in layers.items()}
    assert book.client_down == [75 * 85_822 * 4] * 10


def test_local_moves_nothing():
    _, federation = tiny.federated()
    algorithm = algorithms.local(MLP(3, ()), local_training.sgd(steps=1), federation)
    book = ran(algorithm._replace(train=idle), federation, 2)
    assert (book.total_down, book.total_up, sum(book.client_down + book.client_up)) == (0, 0, 0)
    assert book.visits == [2] * 6
