"""How states grow, against the methods' own formulas."""

import math

import pytest

from experiments import scaling

pytestmark = pytest.mark.slow("programs of hundreds of clients")

P = 4 * 121_182  # bytes of LeNet on CIFAR10
LAYERS, HIDDEN = 5, 100


@pytest.mark.parametrize(
    ("method", "each", "pairs"),
    [
        ("fedavg", 0, 0),
        ("local", P, 0),
        ("fedper", 4 * 850, 0),  # the head, 84 x 10 and 10
        ("fedpac", 4 * 850, 0),  # likewise, in the server's rows
        ("pfedgraph", P, 0),
        # A store, and a hypernetwork with an output for every client in every layer.
        ("pfedla", None, 4 * LAYERS * (HIDDEN + 1)),
        # With their momentum: embeddings of 1 + N / 4 numbers, and 100 weights for each of them.
        ("pfedhn", 8 * (1 + 100 / 4), 2),
    ],
)
def test_growth(method, each, pairs):
    found = scaling.growth(method, "lenet")
    assert found.name == ("N²" if pairs else "N" if each else "1")
    assert found.pairs == pytest.approx(pairs)
    if each is not None:
        assert found.per_client == pytest.approx(each)
    there = scaling.sizes(method, 2000, "lenet").state
    assert there == pytest.approx(found.fixed + 2000 * found.per_client + 2000**2 * found.pairs)
    largest = found.most(8e9)
    if each == 0:
        assert largest == math.inf
    else:
        needed = found.fixed + largest * found.per_client + largest**2 * found.pairs
        assert needed == pytest.approx(8e9)


def test_one_visit():
    sizes = scaling.sizes("fedavg", 8, "lenet")
    assert sizes == (P, 0, P, P)
    assert scaling.sizes("local", 8, "lenet") == (0, 8 * P, 0, 0)


def test_what_devices_send_each_other():
    """FedAvg: upload, loss, whether it is finite, and two bills of five layers."""
    assert scaling.gathered("fedavg", 8)[0] == P + 4 + 1 + 2 * 4 * LAYERS
    # Local: nothing goes down or up, the model stays, and so it comes back once.
    assert scaling.gathered("local", 8)[0] == P + 4 + 1
    assert scaling.received(10, 100, 8) == 7 * 13 * 10
    assert scaling.received(10, 100, 1) == 0
