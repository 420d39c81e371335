"""Diagnostics, compared with hand-computed numbers."""

import numpy as np
import pytest

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core import diagnostics
from fedjax_pfl.core.diagnostics import Observed

EYE = np.broadcast_to(np.eye(4)[:, None], (4, 2, 4))  # four clients, two layers, all Local
EVEN = np.full((4, 2, 4), 0.25)
PFEDLA = METHODS["pfedla"].diagnostics


def test_fractions_and_effective_numbers():
    rows = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0.25] * 4])
    # The entropy of the third row is ½ log 2 + 2 · ¼ log 4 = 1.5 log 2.
    np.testing.assert_allclose(diagnostics.effective_number(rows), [1, 2, 2**1.5, 4], rtol=1e-12)
    after = EVEN.copy()
    after[0, 1] += [0.0011, -0.0011, 0, 0]  # half of the changes: 0.0011
    after[1, 0] += [0.0009, -0.0009, 0, 0]
    assert diagnostics.moving_fraction(after, EVEN) == 0.25
    assert diagnostics.moving_fraction(EVEN, EVEN) == 0.0
    rows = np.array([[0.995, 0.005], [0.985, 0.015], [0.5, 0.5], [0.0, 1.0]])
    assert diagnostics.one_hot_fraction(rows) == 0.5


def observed(alpha, before=None, layers=("conv", "head")):
    return Observed({"alpha": alpha}, {} if before is None else {"alpha": before}, layers)


def test_pfedla():
    alpha = EVEN.copy()
    alpha[:, 1] = np.eye(4)
    read = diagnostics.read(PFEDLA, observed(alpha, EVEN), [], 10, 40)
    assert read.diagnostics["peers"] == pytest.approx({"conv": 4.0, "head": 1.0})
    assert (read.diagnostics["one_hot"], read.diagnostics["moving"]) == (0.5, 1.0)
    assert read.inactive == []
    assert read.remarks == []
    (explanation,) = diagnostics.explanations(PFEDLA, read.diagnostics)
    assert "conv 4.0, head 1.0" in explanation
    assert "share conv most, and keep head most to themselves" in explanation


def test_layers_without_names_first_evaluation_and_no_arrays():
    values = diagnostics.read(PFEDLA, observed(EVEN, layers=()), [], 1, 4).diagnostics
    assert list(values["peers"]) == ["layer 1", "layer 2"]
    assert "moving" not in values
    values = diagnostics.read(PFEDLA, observed(EVEN[:, :1]), [], 1, 4).diagnostics["peers"]
    assert values == pytest.approx({"model": 4.0})
    assert diagnostics.read(PFEDLA, Observed({}, {}, ()), [], 1, 4) == ({}, [], [])
    assert diagnostics.explanations({}, {"peers": 1.0}) == []


def lines(*inactive, every=10):
    return [{"round": every * (n + 1), "inactive": list(names)} for n, names in enumerate(inactive)]


@pytest.mark.parametrize(
    ("earlier", "at", "warns"),
    [
        (lines((), ("one_hot",)), 30, True),  # since round 20: 10 of 40 rounds
        (lines((), ()), 30, False),  # since now
        (lines(("one_hot",), ()), 30, False),  # active in between
        (lines((), ("peers",)), 30, False),  # another diagnostic
        (lines((), ("one_hot",), every=11), 30, False),  # since round 22: 8 of 40
        ([], 40, False),  # a single evaluation has no duration
    ],
)
def test_warning_after_a_quarter_of_the_run(earlier, at, warns):
    read = diagnostics.read(PFEDLA, observed(EYE), earlier, at, 40)
    assert read.inactive == ["one_hot"]
    if warns:
        (remark,) = read.remarks
        assert "one-hot in 100% of its rows" in remark
        assert "pfedla.rate" in remark
    else:
        assert read.remarks == []


def test_uniform_alpha_is_inactive():
    read = diagnostics.read(PFEDLA, observed(EVEN, EVEN), lines(("peers",)), 20, 40)
    assert read.inactive == ["peers"]
    assert read.diagnostics["moving"] == 0.0
    assert "mixes 4.0 of them" in read.remarks[0]
    nearly = EVEN + 0.1 * np.array([3, -1, -1, -1])
    assert diagnostics.read(PFEDLA, observed(nearly), [], 20, 40).inactive == []


def test_models_of_held_out_clients_do_not_count():
    """Clients 0 to 2 share evenly; client 3 takes no part, and its own row mixes all four."""
    alpha = np.full((4, 1, 4), 1 / 4)
    alpha[:3] = np.array([1, 1, 1, 0]) / 3
    assert diagnostics.count_mixed(alpha) == 3
    assert diagnostics.read(PFEDLA, Observed({"alpha": alpha}, {}, (), {}), [], 20, 40).inactive
    assert diagnostics.count_mixed(np.eye(4)) == 0
    assert diagnostics.count_mixed(np.ones((4, 2, 3))) == 3  # candidates
    weights = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0.3, 0.3, 0.4]]
    assert of("factorized_fl", {"weights": weights}).inactive == ["peers"]


def of(method, arrays, before=None, first=None, earlier=(), at=20):
    """Returns a method's diagnostics of arrays by name."""

    def as_arrays(tree):
        return {name: np.asarray(x, float) for name, x in (tree or {}).items()}

    arrays_seen = Observed(as_arrays(arrays), as_arrays(before), (), as_arrays(first))
    return diagnostics.read(METHODS[method].diagnostics, arrays_seen, earlier, at, 40)


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc"])
def test_pfedhn(method):
    v = np.array([[3.0, 0.0], [0.0, 4.0]])  # of length 5
    arrays, first = {"spread": [0.1, 0.3], "embeddings": 1.1 * v}, {"embeddings": v}
    read = of(method, arrays, first=first)
    assert read.diagnostics == pytest.approx({"spread": 0.2, "moved": 0.1})
    assert read.inactive == []
    assert "moved" not in of(method, arrays).diagnostics
    arrays = {"spread": [0.01, 0.02], "embeddings": v}
    inactive = of(method, arrays, first=first, earlier=lines(("spread", "moved")))
    assert inactive.inactive == ["spread", "moved"]
    assert "is 0.0150 of their length" in inactive.remarks[0]
    assert f"see {method}.rate" in inactive.remarks[1]
    fixed = {"spread": [0.1, 0.3], "class_shares": v}  # these do not move
    assert of(method, fixed, first=fixed).diagnostics == pytest.approx({"spread": 0.2})


def test_pefll():
    """Only clients that have sent a descriptor count."""
    arrays = {"spread": [0.5, 0.1, 0.2], "descriptors": [[0, 0], [1, 0], [0, 1]]}
    assert of("pefll", arrays).diagnostics == pytest.approx({"spread": 0.15})
    arrays["descriptors"] = np.zeros((3, 2))
    assert of("pefll", arrays).diagnostics == pytest.approx({"spread": 0.8 / 3})


def test_fedmn():
    # The third client has not trained. Entropies of 0.5, 0.75 and 0.25: 1 and 0.8112781 bits.
    arrays = {"pi": [[0.5, 0.75], [0.75, 0.25], [0.0, 0.0]]}
    read = of("fedmn", arrays)
    bits = 0.25 * np.log2(4) + 0.75 * np.log2(4 / 3)
    assert read.diagnostics == pytest.approx(
        {"routes": 2, "gate_bits": (1 + 3 * bits) / 4, "deviation": (0.125 + 0.25) / 2}
    )
    assert read.inactive == []
    similar = of("fedmn", {"pi": [[0.7, 0.2], [0.71, 0.2]]}, earlier=lines(("deviation",)))
    assert (similar.diagnostics["routes"], similar.inactive) == (1, ["deviation"])
    assert "deviates by 0.0025" in similar.remarks[0]
    assert of("fedmn", {"pi": np.zeros((2, 2))}) == ({}, [], [])


def test_factorized_fl():
    read = of("factorized_fl", {"weights": [[0.5, 0.5, 0], [0, 1, 0], [0.25, 0.25, 0.5]]})
    expected = {"peers": (2 + 1 + 2**1.5) / 3, "candidates": 6 / 9, "alone": 1 / 3}
    assert read.diagnostics == pytest.approx(expected)
    assert read.inactive == []
    nearly = np.full((3, 3), 1 / 3) + 0.02 * (3 * np.eye(3) - 1)
    for weights, name, word in ((nearly, "peers", "plain mean"), (np.eye(3), "alone", "100%")):
        inactive = of("factorized_fl", {"weights": weights}, earlier=lines((name,)))
        assert inactive.inactive == [name]
        assert word in inactive.remarks[0]


def test_fedfomo():
    before = {"affinity": [[0, 1.0], [-2.0, 0]]}
    read = of("fedfomo", {"affinity": [[0, 1.5], [-2.5, 0]]}, before)
    assert (read.diagnostics, read.inactive) == ({"positive": 0.5}, [])
    assert of("fedfomo", before).diagnostics == {"positive": 0.5}  # since the start
    assert of("fedfomo", before, before).diagnostics == {}  # no weight changed
    inactive = of("fedfomo", {"affinity": [[0, 0], [-3, 0]]}, before, earlier=lines(("positive",)))
    assert "fedfomo.reference" in inactive.remarks[0]


def test_clustered_fl_and_fedem():
    assert of("clustered_fl", {"cluster": [0, 2, 0, 1]}).diagnostics == {"clusters": 3}
    one_cluster = of("clustered_fl", {"cluster": [0, 0]}, earlier=lines(("clusters",)))
    assert "there is 1 cluster, which is FedAvg" in one_cluster.remarks[0]
    assert of("ifca", {"cluster": [2, 2, -1]}).inactive == ["clusters"]  # one has not chosen yet
    read = of("fedem", {"pi": [[0.5, 0.5], [1.0, 0.0]]})
    assert read.diagnostics == pytest.approx({"share_bits": 0.5, "deviation": 0.25})
    assert of("fedem", {"pi": [[0.5, 0.5]] * 2}).inactive == ["deviation"]


def test_diagnostics_have_meanings_and_warnings():
    for method in METHODS.values():
        for diagnostic in method.diagnostics.values():
            assert diagnostic.meaning
            assert (diagnostic.inactive is None) == (diagnostic.warning == "")
