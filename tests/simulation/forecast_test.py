"""What a run needs, worked out by hand, and where it is then kept."""

import math

import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.runs import build
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import forecast
from fedjax_pfl.simulation.forecast import Need, Room, Sizes

# A thousand clients of 100 bytes, ten in each of five rounds, beside a server of 7.
SIZES = Sizes(7, 0, 100, 1000, 10, 5, 40_000, 400, best=False)
ONE = {"several": False, "processes": 1}


def test_needs():
    assert forecast.need(SIZES, "device") == Need(100_007 + 40_000, 100_007, 2 * 100_007)
    host = forecast.need(SIZES, "host")
    assert host == Need(7 + 3 * 1000 + 2 * 400, 7 + 40_000 + 5000, 2 * (7 + 5000))
    disk = forecast.need(SIZES, "disk")
    assert disk == Need(host.device, host.host - 5000, host.disk + 5000)
    best = SIZES._replace(best=True, rounds=1000)  # all have trained, and are there twice
    assert forecast.need(best, "host").host == 2 * 7 + 40_000 + 2 * 100_000
    assert forecast.need(best, "device").host == 2 * 100_007
    assert forecast.need(SIZES._replace(points=3), "device").device == 3 * 100_007 + 40_000
    rows = SIZES._replace(row=50)
    assert forecast.need(rows, "device").device == 150_007 + 40_000
    assert forecast.need(rows, "host").device == host.device + 50_000
    assert forecast.need(rows, "disk").disk == disk.disk + 2 * 50_000
    # Rows of which 40 bytes lie where clients' do, and are on the device for those of a round.
    some = forecast.need(rows._replace(offload=40), "host")
    shared = 7 + 10 * 1000
    assert some.device == shared + 3 * 1000 + 2 * 400 + 2 * 400
    assert (some.host, some.disk) == (shared + 40_000 + 50 * 140, 2 * (shared + 50 * 140))
    # 143 clients at most on each of seven devices; the examples are on all.
    sharded = forecast.need(rows._replace(devices=7), "sharded")
    assert sharded == Need(7 + 143 * 150 + 40_000, 150_007, 2 * 150_007)


@pytest.mark.parametrize(
    ("there", "store"),
    [
        (Room(math.inf, math.inf, math.inf, True), "device"),
        (Room(300_000, 300_000, math.inf, True), "device"),
        (Room(270_000, 300_000, math.inf, True), "host"),  # more than half of a device
        (Room(300_000, 300_000, math.inf, False), "host"),  # one memory for both
        (Room(90_000, 90_000, math.inf, False), "disk"),
        (Room(90_000, 46_000, math.inf, True), "host"),  # none fits well; this one fits
    ],
)
def test_auto_takes_the_first_that_fits_well(there, store):
    assert forecast.choose([SIZES], "auto", there, **ONE) == store


@pytest.mark.parametrize(
    ("store", "there", "how", "wanted"),
    [
        ("auto", Room(120_000, 3e5, math.inf, True), ONE, "sharded"),  # 140 kB on the device
        ("auto", Room(120_000, 3e5, math.inf, True), {**ONE, "processes": 2}, "sharded"),
        ("auto", Room(1e6, 1e6, math.inf, True), ONE, "device"),
        # One memory for eight devices: eight times the examples are more than on the host
        ("auto", Room(3e5, 3e5, math.inf, False, 8), ONE, "host"),
        ("sharded", Room(1e6, 1e6, math.inf, True), ONE, "sharded"),
    ],
)
def test_state_is_spread_where_that_is_what_fits(store, there, how, wanted):
    assert forecast.choose([SIZES._replace(devices=8)], store, there, **how) == wanted
    assert forecast.choose([SIZES], "sharded", Room(1e6, 1e6, math.inf, True), **how) == "device"


def test_what_cannot_be_is_refused_with_what_can():
    small = Room(100_000, 200_000, math.inf, True)
    with pytest.raises(UsageError, match=r"needs at least 140 kB on a device.*100 kB; use store=h"):
        forecast.choose([SIZES], "device", small, **ONE)
    with pytest.raises(UsageError, match=r"store=device this run.*; take fewer clients"):
        forecast.choose([SIZES], "auto", small, several=True, processes=1)
    none = Room(1000, 1000, math.inf, True)
    with pytest.raises(UsageError, match="take fewer clients or examples, or a smaller model"):
        forecast.choose([SIZES], "disk", none, **ONE)
    with pytest.raises(
        UsageError, match="45 kB of memory, of which there are 44 kB; use store=disk"
    ):
        forecast.choose([SIZES], "host", Room(1e6, 44_000, math.inf, True), **ONE)


def test_examples():
    split, none = Split(np.zeros((3, 4), np.int32), np.array([1, 4, 2])), np.zeros(3, np.int32)
    empty = Split(np.zeros((3, 1), np.int32), none)
    data = FederatedData(np.zeros((10, 8), np.uint8), none[:1].repeat(10), split, empty, empty)
    # 8 bytes and a label of 4 each; of two clients six examples at most.
    _, sent, mapped = forecast.examples_of(data, 2)
    assert (sent, mapped) == (6 * 12, 0)
    in_a_file = SIZES._replace(mapped=30_000)
    assert forecast.need(in_a_file, "host").host == forecast.need(SIZES, "host").host - 30_000
    assert forecast.need(in_a_file, "device") == forecast.need(SIZES, "device")


def test_a_run_says_what_it_needs_and_where_it_goes(monkeypatch):
    made = configuration.default()
    made.update(
        algorithm="local",
        dataset="synthetic",
        partition="iid",
        clients=20,
        clients_per_round=2,
        rounds=3,
        model="mlp",
        devices=1,
    )
    usual = build.build(made)
    assert [phase.store for phase in usual.phases] == ["device"]
    model = 4 * (64 * 200 + 200 + 200 * 10 + 10)
    assert usual.needs.device == 20 * model + forecast.examples_of(usual.data, 2)[0]
    limit = 1.5 * usual.needs.device
    monkeypatch.setattr(forecast, "room", lambda _: Room(limit, 1e12, math.inf, True))
    less = build.build(made)
    assert [phase.store for phase in less.phases] == ["host"]
    assert less.needs.device < usual.needs.device


@pytest.mark.parametrize(
    ("number", "text"), [(850, "850 B"), (484_728, "485 kB"), (999_600, "1 MB"), (2e18, "2000 PB")]
)
def test_readable(number, text):
    assert forecast.readable(number) == text
