"""Tests of the measurement of the server's part of a round."""

import jax
import numpy as np
import pytest

from experiments.libraries import server_share
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny

pytestmark = pytest.mark.slow("programs with and without a server")

ROW = {
    "clients": 1000,
    "cohort": 100,
    "store": "sharded",
    "ok": True,
    "server": 2.0,
    "training": 18.0,
    "share": 0.1,
    "products": 1.5,
    "stored": 2.5e9,
    "peak": 4e9,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pfedla", marks=pytest.mark.slow("the same programs for another method")),
        "fedamp",
    ],
)
def test_clients_do_the_same_work_without_the_server(name: str):
    """In the first round all stored models are equal, and so is what clients download."""
    data, federation = tiny.federated()
    key, t, n = jax.random.key(1), np.int32(0), np.int32(1)
    logs, states = [], []
    method = cases.make(name, federation)
    for algorithm in (method, server_share.without_server(method)):
        rounds = make_rounds(algorithm, federation, cohort=4)
        state, (log,) = rounds.run(key, rounds.init(key), data, t, n)
        logs.append(log)
        states.append(state)
    np.testing.assert_allclose(logs[0].metrics["loss"], logs[1].metrics["loss"], rtol=1e-5)
    assert logs[1].metrics["loss"].all()
    jax.tree.map(np.testing.assert_array_equal, logs[0].up, logs[1].up)
    jax.tree.map(np.testing.assert_array_equal, logs[0].down, logs[1].down)
    assert jax.tree.leaves(states[0].rows)
    assert not jax.tree.leaves(states[1].rows)


def test_a_row_as_text_and_in_the_table():
    failed = {"clients": 5000, "store": "sharded", "ok": False}
    measured = [ROW, {**ROW, "clients": 200}, failed]
    rows = {"pfedla": measured, "pfedla, 4 hidden units": [ROW]}
    table = server_share.table(rows)
    assert table.rows.pop()[0] == "pFedLA, 4 hidden units, 100 of 1,000 clients"
    assert table.rows == [
        ["pFedLA, 100 of 200 clients", "sharded", "18", "2", "1.5", "10.0 %", "2.5", "4"],
        [
            "pFedLA, 100 of 1,000 clients",
            *("sharded", "18", "2", "1.5", "10.0 %", "2.5", "4"),
        ],
    ]
    assert len(table.heads) == 7
    assert server_share.line(ROW) == (
        "server 2.00 s, training 18.00 s, 10.0 %; products alone 1.50 s; stored 2.50 GB, peak "
        "1.60 x"
    )
    assert server_share.line({**ROW, "stored": 0}).endswith("stored 0.00 GB, peak 4.00 GB")


@pytest.mark.slow("compiles LeNet's programs three times")
@pytest.mark.parametrize(("method", "hypernetwork"), [("fedamp", 0), ("pfedla", 844)])
def test_measured_row(method: str, hypernetwork: int):
    """v has 100 numbers; layers 100-4-4-4, and a head 4-12 for each of the five layers of LeNet."""
    row = server_share.measure(method, 12, 4, 1, "device", hidden=4)
    assert row["training"] > 0
    assert 0 <= row["share"] < 1
    assert row["products"] > 0
    assert row["stored"] == 12 * (121_182 + hypernetwork) * 4
    assert len(row["turns"]) == 1
