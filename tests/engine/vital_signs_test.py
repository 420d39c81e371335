"""Vital signs against numbers worked out by hand."""

import numpy as np
import pytest

from fedjax_pfl.engine import vital_signs
from fedjax_pfl.engine.vital_signs import SIGNS, Shown

EYE = np.broadcast_to(np.eye(4)[:, None], (4, 2, 4))  # four clients, two layers, all Local
EVEN = np.full((4, 2, 4), 0.25)
PFEDLA = SIGNS["pfedla"]


def test_peers_are_the_exponential_of_the_entropy():
    rows = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0.25] * 4])
    # The third: entropy ½ log 2 + 2 · ¼ log 4 = 1.5 log 2.
    np.testing.assert_allclose(vital_signs.peers(rows), [1, 2, 2**1.5, 4], rtol=1e-12)


def test_who_moves_has_a_row_that_changed_by_more_than_a_thousandth():
    after = EVEN.copy()
    after[0, 1] += [0.0011, -0.0011, 0, 0]  # half of the changes: .0011
    after[1, 0] += [0.0009, -0.0009, 0, 0]
    assert vital_signs.moving(after, EVEN) == 0.25
    assert vital_signs.moving(EVEN, EVEN) == 0.0


def test_a_row_is_one_hot_above_99_per_cent():
    rows = np.array([[0.995, 0.005], [0.985, 0.015], [0.5, 0.5], [0.0, 1.0]])
    assert vital_signs.one_hot(rows) == 0.5


def seen(now, before=None, layers=("conv", "head")):
    return Shown({"alpha": now}, {} if before is None else {"alpha": before}, layers)


def test_pfedla_says_who_mixes_what_by_layer():
    now = EVEN.copy()
    now[:, 1] = np.eye(4)
    read = vital_signs.read(PFEDLA, seen(now, EVEN), [], 10, 40)
    assert read.observed["peers"] == pytest.approx({"conv": 4.0, "head": 1.0})
    assert (read.observed["one_hot"], read.observed["moving"]) == (0.5, 1.0)
    assert read.dead == []
    assert read.remarks == []
    (said,) = vital_signs.lessons("pfedla", read.observed)
    assert "conv 4.0, head 1.0" in said
    assert "share conv most, and keep head most to themselves" in said


def test_layers_that_are_not_those_of_the_network_are_numbered():
    assert list(vital_signs.read(PFEDLA, seen(EVEN, layers=()), [], 1, 4).observed["peers"]) == [
        "layer 1",
        "layer 2",
    ]
    whole = vital_signs.read(PFEDLA, seen(EVEN[:, :1]), [], 1, 4).observed["peers"]
    assert whole == pytest.approx({"model": 4.0})


def test_the_first_evaluation_cannot_say_who_moves():
    assert "moving" not in vital_signs.read(PFEDLA, seen(EVEN), [], 10, 40).observed


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
    read = vital_signs.read(PFEDLA, seen(EYE), earlier, at, 40)
    assert read.dead == ["one_hot"]
    if said:
        (remark,) = read.remarks
        assert "one-hot in 100% of its rows" in remark
        assert "pfedla.rate" in remark
    else:
        assert read.remarks == []


def test_a_uniform_alpha_is_dead_too():
    read = vital_signs.read(PFEDLA, seen(EVEN, EVEN), lines(("peers",)), 20, 40)
    assert read.dead == ["peers"]
    assert read.observed["moving"] == 0.0
    assert "mixes 4.0 of them" in read.remarks[0]
    nearly = EVEN + 0.1 * np.array([3, -1, -1, -1])
    assert vital_signs.read(PFEDLA, seen(nearly), [], 20, 40).dead == []


def test_one_without_the_arrays_has_no_signs():
    read = vital_signs.read(PFEDLA, Shown({}, {}, ()), [], 1, 4)
    assert read == ({}, [], [])
    assert vital_signs.lessons("fedavg", {}) == []


def test_every_sign_is_explained():
    for signs in SIGNS.values():
        for sign in signs.values():
            assert sign.what
            assert (sign.dead is None) == (sign.sentence == "")
