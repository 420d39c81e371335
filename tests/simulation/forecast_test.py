"""Memory that a run needs, against numbers worked out by hand, and the store that follows."""

import math

import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.runs import build
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import forecast
from fedjax_pfl.simulation.forecast import Capacity, PhaseSizes, Requirement

# 1,000 clients of 100 bytes each, 10 in each of 5 rounds, and a server state of 7 bytes.
SIZES = PhaseSizes(
    server=7,
    row=0,
    client=100,
    clients=1000,
    cohort=10,
    rounds=5,
    examples=40_000,
    cohort_examples=400,
    has_best=False,
)
SINGLE = {"several": False, "processes": 1}


def test_requirements_by_store():
    on_device = Requirement(100_007 + 40_000, 100_007, 2 * 100_007)
    assert forecast.required(SIZES, "device") == on_device
    host = forecast.required(SIZES, "host")
    assert host == Requirement(7 + 3 * 1000 + 2 * 400, 7 + 40_000 + 5000, 2 * (7 + 5000))
    disk = forecast.required(SIZES, "disk")
    assert disk == Requirement(host.device, host.host - 5000, host.disk + 5000)
    best = SIZES._replace(has_best=True, rounds=1000)  # all clients have trained; two states
    assert forecast.required(best, "host").host == 2 * 7 + 40_000 + 2 * 100_000
    assert forecast.required(best, "device").host == 2 * 100_007
    sweep = SIZES._replace(sweep_runs=3)
    assert forecast.required(sweep, "device").device == 3 * 100_007 + 40_000
    rows = SIZES._replace(row=50)
    assert forecast.required(rows, "device").device == 150_007 + 40_000
    assert forecast.required(rows, "host").device == host.device + 50_000
    assert forecast.required(rows, "disk").disk == disk.disk + 2 * 50_000
    # 40 of the 50 bytes of a row are offloaded: only those of a cohort are on the device.
    offloaded = forecast.required(rows._replace(offload=40), "host")
    shared = 7 + 10 * 1000
    assert offloaded.device == shared + 3 * 1000 + 2 * 400 + 2 * 400
    assert (offloaded.host, offloaded.disk) == (shared + 40_000 + 50 * 140, 2 * (shared + 50 * 140))
    # At most 143 clients on each of 7 devices; every device has all examples.
    sharded = forecast.required(rows._replace(devices=7), "sharded")
    assert sharded == Requirement(7 + 143 * 150 + 40_000, 150_007, 2 * 150_007)


@pytest.mark.parametrize(
    ("available", "store"),
    [
        (Capacity(math.inf, math.inf, math.inf, True), "device"),
        (Capacity(300_000, 300_000, math.inf, True), "device"),
        (Capacity(270_000, 300_000, math.inf, True), "host"),  # more than half of the device
        (Capacity(300_000, 300_000, math.inf, False), "host"),  # one memory for both
        (Capacity(90_000, 90_000, math.inf, False), "disk"),
        (Capacity(90_000, 46_000, math.inf, True), "host"),  # fits, but nothing fits well
    ],
)
def test_auto_chooses_the_first_store_that_fits_well(available, store):
    assert forecast.choose_store([SIZES], "auto", available, **SINGLE) == store


@pytest.mark.parametrize(
    ("store", "available", "settings", "expected"),
    [
        ("auto", Capacity(120_000, 3e5, math.inf, True), SINGLE, "sharded"),  # device: 140 kB
        ("auto", Capacity(120_000, 3e5, math.inf, True), {**SINGLE, "processes": 2}, "sharded"),
        ("auto", Capacity(1e6, 1e6, math.inf, True), SINGLE, "device"),
        # Eight devices share one memory: eight times the examples do not fit.
        ("auto", Capacity(3e5, 3e5, math.inf, False, 8), SINGLE, "host"),
        ("sharded", Capacity(1e6, 1e6, math.inf, True), SINGLE, "sharded"),
    ],
)
def test_sharded_store_with_several_devices(store, available, settings, expected):
    phases = [SIZES._replace(devices=8)]
    assert forecast.choose_store(phases, store, available, **settings) == expected
    large = Capacity(1e6, 1e6, math.inf, True)
    assert forecast.choose_store([SIZES], "sharded", large, **settings) == "device"


def test_error_names_the_shortage_and_a_store_that_fits():
    small = Capacity(100_000, 200_000, math.inf, True)
    with pytest.raises(
        UsageError, match=r"needs at least 140 kB on a device \(100 kB available\); use store=host"
    ):
        forecast.choose_store([SIZES], "device", small, **SINGLE)
    with pytest.raises(UsageError, match=r"store=device this run.*; use fewer clients"):
        forecast.choose_store([SIZES], "auto", small, several=True, processes=1)
    tiny = Capacity(1000, 1000, math.inf, True)
    with pytest.raises(UsageError, match="use fewer clients or examples, or a smaller model"):
        forecast.choose_store([SIZES], "disk", tiny, **SINGLE)
    with pytest.raises(
        UsageError, match=r"45 kB of memory \(44 kB available\); use store=disk, or a smaller model"
    ):
        forecast.choose_store([SIZES], "host", Capacity(1e6, 44_000, math.inf, True), **SINGLE)


def test_example_bytes_of_the_largest_cohort():
    sizes, zeros = np.array([1, 4, 2]), np.zeros(3, np.int32)
    split, empty = Split(np.zeros((3, 4), np.int32), sizes), Split(zeros[:, None], zeros)
    data = FederatedData(np.zeros((10, 8), np.uint8), np.zeros(10, np.int32), split, empty, empty)
    # An example has 8 bytes and a label of 4; two clients have at most six.
    _, of_cohort, mapped = forecast.example_bytes(data, 2)
    assert (of_cohort, mapped) == (6 * 12, 0)
    from_file = SIZES._replace(mapped=30_000)
    host = forecast.required(SIZES, "host").host
    assert forecast.required(from_file, "host").host == host - 30_000
    assert forecast.required(from_file, "device") == forecast.required(SIZES, "device")


def test_build_chooses_the_store_by_the_memory_of_the_machine(monkeypatch):
    config = configuration.default()
    config.update(
        algorithm="local",
        dataset="synthetic",
        partition="iid",
        clients=20,
        clients_per_round=2,
        rounds=3,
        model="mlp",
        devices=1,
    )
    on_device = build.build(config)
    assert [phase.store for phase in on_device.phases] == ["device"]
    model = 4 * (64 * 200 + 200 + 200 * 10 + 10)
    examples = forecast.example_bytes(on_device.data, 2)[0]
    assert on_device.memory.device == 20 * model + examples
    limit = 1.5 * on_device.memory.device
    monkeypatch.setattr(forecast, "capacity", lambda _: Capacity(limit, 1e12, math.inf, True))
    on_host = build.build(config)
    assert [phase.store for phase in on_host.phases] == ["host"]
    assert on_host.memory.device < on_device.memory.device


@pytest.mark.parametrize(
    ("count", "text"), [(850, "850 B"), (484_728, "485 kB"), (999_600, "1 MB"), (2e18, "2,000 PB")]
)
def test_format_bytes(count, text):
    assert forecast.format_bytes(count) == text
