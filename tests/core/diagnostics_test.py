"""Diagnostics against numbers worked out by hand."""

import numpy as np
import pytest

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core import diagnostics
from fedjax_pfl.core.diagnostics import Observed

EYE = np.broadcast_to(np.eye(4)[:, None], (4, 2, 4))  # four clients, two layers, all Local
EVEN = np.full((4, 2, 4), 0.25)
PFEDLA = METHODS["pfedla"].diagnostics


def test_peers_are_the_exponential_of_the_entropy():
    rows = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0.25] * 4])
    # The third: entropy ½ log 2 + 2 · ¼ log 4 = 1.5 log 2.
    np.testing.assert_allclose(diagnostics.effective_number(rows), [1, 2, 2**1.5, 4], rtol=1e-12)


def test_who_moves_has_a_row_that_changed_by_more_than_a_thousandth():
    after = EVEN.copy()
    after[0, 1] += [0.0011, -0.0011, 0, 0]  # half of the changes: .0011
    after[1, 0] += [0.0009, -0.0009, 0, 0]
    assert diagnostics.moving_fraction(after, EVEN) == 0.25
    assert diagnostics.moving_fraction(EVEN, EVEN) == 0.0


def test_a_row_is_one_hot_above_99_per_cent():
    rows = np.array([[0.995, 0.005], [0.985, 0.015], [0.5, 0.5], [0.0, 1.0]])
    assert diagnostics.one_hot_fraction(rows) == 0.5


def seen(now, before=None, layers=("conv", "head")):
    return Observed({"alpha": now}, {} if before is None else {"alpha": before}, layers)


def test_pfedla_says_who_mixes_what_by_layer():
    now = EVEN.copy()
    now[:, 1] = np.eye(4)
    read = diagnostics.read(PFEDLA, seen(now, EVEN), [], 10, 40)
    assert read.observed["peers"] == pytest.approx({"conv": 4.0, "head": 1.0})
    assert (read.observed["one_hot"], read.observed["moving"]) == (0.5, 1.0)
    assert read.dead == []
    assert read.remarks == []
    (said,) = diagnostics.explanations(PFEDLA, read.observed)
    assert "conv 4.0, head 1.0" in said
    assert "share conv most, and keep head most to themselves" in said


def test_layers_that_are_not_those_of_the_network_are_numbered():
    assert list(diagnostics.read(PFEDLA, seen(EVEN, layers=()), [], 1, 4).observed["peers"]) == [
        "layer 1",
        "layer 2",
    ]
    whole = diagnostics.read(PFEDLA, seen(EVEN[:, :1]), [], 1, 4).observed["peers"]
    assert whole == pytest.approx({"model": 4.0})


def test_the_first_evaluation_cannot_say_who_moves():
    assert "moving" not in diagnostics.read(PFEDLA, seen(EVEN), [], 10, 40).observed


def lines(*dead, every=10):
    return [{"round": every * (n + 1), "dead": list(names)} for n, names in enumerate(dead)]


@pytest.mark.parametrize(
    ("earlier", "at", "said"),
    [
        (lines((), ("one_hot",)), 30, True),  # since round 20: 10 of 40 rounds
        (lines((), ()), 30, False),  # since now
        (lines(("one_hot",), ()), 30, False),  # it has been alive in between
        (lines((), ("peers",)), 30, False),  # another one
        (lines((), ("one_hot",), every=11), 30, False),  # since round 22: 8 of 40
        ([], 40, False),  # a single evaluation says nothing of how long
    ],
)
def test_dead_for_a_quarter_of_the_run_is_said(earlier, at, said):
    read = diagnostics.read(PFEDLA, seen(EYE), earlier, at, 40)
    assert read.dead == ["one_hot"]
    if said:
        (remark,) = read.remarks
        assert "one-hot in 100% of its rows" in remark
        assert "pfedla.rate" in remark
    else:
        assert read.remarks == []


def test_a_uniform_alpha_is_dead_too():
    read = diagnostics.read(PFEDLA, seen(EVEN, EVEN), lines(("peers",)), 20, 40)
    assert read.dead == ["peers"]
    assert read.observed["moving"] == 0.0
    assert "mixes 4.0 of them" in read.remarks[0]
    nearly = EVEN + 0.1 * np.array([3, -1, -1, -1])
    assert diagnostics.read(PFEDLA, seen(nearly), [], 20, 40).dead == []


def of(method, now, before=None, first=None, earlier=(), at=20):
    """The signs of arrays by name, and their remarks after dead evaluations until round 10."""

    def arrays(tree):
        return {name: np.asarray(x, float) for name, x in (tree or {}).items()}

    shown = Observed(arrays(now), arrays(before), (), arrays(first))
    return diagnostics.read(METHODS[method].diagnostics, shown, earlier, at, 40)


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc"])
def test_hypernetworks_say_how_far_apart_models_are_and_how_far_v_went(method):
    v = np.array([[3.0, 0.0], [0.0, 4.0]])  # of length 5
    now = {"spread": [0.1, 0.3], "embeddings": 1.1 * v}  # by .5
    read = of(method, now, first={"embeddings": v})
    assert read.observed == pytest.approx({"spread": 0.2, "moved": 0.1})
    assert read.dead == []
    assert "moved" not in of(method, now).observed
    still = of(
        method,
        {"spread": [0.01, 0.02], "embeddings": v},
        first={"embeddings": v},
        earlier=lines(("spread", "moved")),
    )
    assert still.dead == ["spread", "moved"]
    assert "is 0.0150 of their length" in still.remarks[0]
    assert f"see {method}.rate" in still.remarks[1]


def test_fedmn_says_how_many_routes_there_are_and_how_decided_they_are():
    # The third has not trained. Entropies of .5, .75 and .25: 1 and .8112781 bits.
    now = {"pi": [[0.5, 0.75], [0.75, 0.25], [0.0, 0.0]]}
    read = of("fedmn", now)
    bits = 0.25 * np.log2(4) + 0.75 * np.log2(4 / 3)
    assert read.observed == pytest.approx(
        {"routes": 2, "gate_bits": (1 + 3 * bits) / 4, "deviation": (0.125 + 0.25) / 2}
    )
    assert read.dead == []
    alike = of("fedmn", {"pi": [[0.7, 0.2], [0.71, 0.2]]}, earlier=lines(("deviation",)))
    assert (alike.observed["routes"], alike.dead) == (1, ["deviation"])
    assert "deviates by 0.0025" in alike.remarks[0]
    assert of("fedmn", {"pi": np.zeros((2, 2))}) == ({}, [], [])


def test_factorized_fl_says_how_many_are_mixed_and_who_is_alone():
    read = of("factorized_fl", {"weights": [[0.5, 0.5, 0], [0, 1, 0], [0.25, 0.25, 0.5]]})
    wanted = {"peers": (2 + 1 + 2**1.5) / 3, "candidates": 6 / 9, "alone": 1 / 3}
    assert read.observed == pytest.approx(wanted)
    assert read.dead == []
    nearly = np.full((3, 3), 1 / 3) + 0.02 * (3 * np.eye(3) - 1)
    for weights, name, word in ((nearly, "peers", "plain mean"), (np.eye(3), "alone", "100%")):
        dead = of("factorized_fl", {"weights": weights}, earlier=lines((name,)))
        assert dead.dead == [name]
        assert word in dead.remarks[0]


def test_fedfomo_says_what_share_of_weights_is_positive():
    before = {"affinity": [[0, 1.0], [-2.0, 0]]}
    read = of("fedfomo", {"affinity": [[0, 1.5], [-2.5, 0]]}, before)
    assert (read.observed, read.dead) == ({"positive": 0.5}, [])
    assert of("fedfomo", before).observed == {"positive": 0.5}  # the first: since the start
    assert of("fedfomo", before, before).observed == {}  # nobody was weighed
    still = of("fedfomo", {"affinity": [[0, 0], [-3, 0]]}, before, earlier=lines(("positive",)))
    assert "fedfomo.reference" in still.remarks[0]


def test_clustered_fl_and_fedem():
    assert of("clustered_fl", {"cluster": [0, 2, 0, 1]}).observed == {"clusters": 3}
    whole = of("clustered_fl", {"cluster": [0, 0]}, earlier=lines(("clusters",)))
    assert "there is 1 cluster, which is FedAvg" in whole.remarks[0]
    read = of("fedem", {"pi": [[0.5, 0.5], [1.0, 0.0]]})
    assert read.observed == pytest.approx({"share_bits": 0.5, "deviation": 0.25})
    assert of("fedem", {"pi": [[0.5, 0.5]] * 2}).dead == ["deviation"]


def test_without_the_arrays_there_are_no_diagnostics():
    read = diagnostics.read(PFEDLA, Observed({}, {}, ()), [], 1, 4)
    assert read == ({}, [], [])
    assert diagnostics.explanations({}, {"peers": 1.0}) == []


def test_every_diagnostic_is_explained():
    for method in METHODS.values():
        for diagnostic in method.diagnostics.values():
            assert diagnostic.meaning
            assert (diagnostic.inactive is None) == (diagnostic.warning == "")
