"""Tests of the growth of states against formulas of the methods, and of the command."""

import json
import math

import pytest
from absl import flags

from experiments import scaling
from tests.commands import Flags, message

SLOW = pytest.mark.slow("programs of hundreds of clients")

P = 4 * 121_182  # bytes of LeNet on CIFAR10
LAYERS, HIDDEN = 5, 100


@SLOW
@pytest.mark.parametrize(
    ("method", "per_client", "pairs"),
    [
        ("fedavg", 0, 0),
        ("local", P, 0),
        ("fedper", 4 * 850, 0),  # the head, 84 x 10 and 10
        ("fedpac", 4 * 850, 0),  # the head, in the server's rows
        ("pfedgraph", P, 0),
        # Stored models, and a hypernetwork with an output for every client in every layer.
        ("pfedla", None, 4 * LAYERS * (HIDDEN + 1)),
        # With their momentum: embeddings of 1 + N / 4 numbers, and 100 weights for each of them.
        ("pfedhn", 8 * (1 + 100 / 4), 2),
    ],
)
def test_growth(method, per_client, pairs):
    growth = scaling.growth(method, "lenet")
    assert growth.name == ("N²" if pairs else "N" if per_client else "1")
    assert growth.pairs == pytest.approx(pairs)
    if per_client is not None:
        assert growth.per_client == pytest.approx(per_client)
    state = scaling.sizes(method, 2000, "lenet").state
    assert state == pytest.approx(growth.fixed + 2000 * growth.per_client + 2000**2 * growth.pairs)
    largest = growth.most(8e9)
    if per_client == 0:
        assert largest == math.inf
    else:
        needed = growth.fixed + largest * growth.per_client + largest**2 * growth.pairs
        assert needed == pytest.approx(8e9)


@SLOW
def test_sizes_of_one_client_update():
    sizes = scaling.sizes("fedavg", 8, "lenet")
    assert sizes == (P, 0, P, P)
    assert scaling.sizes("local", 8, "lenet") == (0, 8 * P, 0, 0)


@SLOW
def test_bytes_between_devices():
    """FedAvg: upload, loss, a finiteness flag, and bytes of five layers in both directions."""
    assert scaling.gathered("fedavg", 8)[0] == P + 4 + 1 + 2 * 4 * LAYERS
    # Local: no traffic, and the client-side model returns once.
    assert scaling.gathered("local", 8)[0] == P + 4 + 1
    assert scaling.received(10, 100, 8) == 7 * 13 * 10
    assert scaling.received(10, 100, 1) == 0


def test_a_fixed_state_beyond_the_memory_leaves_no_client():
    assert scaling.Growth(fixed=2e8, per_client=1e3, pairs=0.0).most(1e8) == 0
    assert scaling.Growth(fixed=2e8, per_client=1e3, pairs=1.0).most(1e8) == 0
    assert scaling.Growth(fixed=2e8, per_client=0.0, pairs=0.0).most(1e8) == 0


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Calls the command with ten clients, and returns the file that it writes."""

    def call(model, *methods):
        values = {"clients": ["10"], "model": model, "methods": list(methods), "cohort": 4}
        values |= {"memory_gb": 1.0, "devices": 8, "out": str(tmp_path / "out.json")}
        monkeypatch.setattr(flags, "FLAGS", Flags(**values))
        scaling.main(["scaling"])
        return json.loads((tmp_path / "out.json").read_text())

    return call


def test_methods_that_a_network_cannot_have_are_left_out(call, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "growth", lambda *_: scaling.Growth(1.0, 0.0, 0.0))
    monkeypatch.setattr(scaling, "gathered", lambda *_: (1, 1))
    assert list(call("mlp", "fedbn", "local")["methods"]) == ["local"]
    _, fedbn, local = capsys.readouterr().out.splitlines()
    assert fedbn.startswith("fedbn          left out: fedbn needs a network with BatchNorm, and ")
    assert local.startswith("local  ")


def test_networks_of_text_are_refused(call, tmp_path, monkeypatch):
    assert message(call, "lstm", "local") == (
        "--model=lstm does not take images; use one of cnn, dropout_cnn, lenet, mlp, mobilenet, "
        "resnet9, small"
    )
    monkeypatch.setattr(flags, "FLAGS", Flags(clients=[]))
    assert message(scaling.main, ["scaling"]).startswith("--clients has ''; give whole numbers")
    assert not (tmp_path / "out.json").exists()
