"""Tests of the list of measurements that need a GPU."""

import pytest

from experiments import benchmark
from experiments.libraries import device_list
from tests.commands import Flags, message


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"work": ["mlp"]}, "work"),
        ({"repeats": 9}, "repeats"),
        ({"torch": False}, "notorch"),
        ({"note": "busy"}, "note"),
        ({"picture": "a.png"}, "picture"),
        ({"add": True}, "add"),
        ({"limit": 9.0}, "limit"),
        ({"fl_bench": "checkout"}, "fl_bench"),
        ({"fl_bench_python": "python"}, "fl_bench_python"),
    ],
)
def test_flags_that_the_items_do_not_read_are_refused(given, name, monkeypatch):
    values = {"device": "gpu", "list": False, "out": "a.json", "seconds": 1.0} | given
    monkeypatch.setattr(benchmark.flags, "FLAGS", Flags(**values))
    monkeypatch.setattr(device_list, "run_all", lambda *_: pytest.fail("it runs"))
    line = f"--{name} has no effect with --device; leave it out"
    assert message(benchmark.main, ["benchmark"]) == line


def test_a_picture_needs_a_workload_that_it_shows(monkeypatch):
    values = {"device": None, "list": False, "picture": "/nowhere/a.png"}
    line = "--picture has no effect without a workload lenet-… in --work; leave it out"
    for work in (["mlp"], ["profile-lenet-10"]):
        monkeypatch.setattr(benchmark.flags, "FLAGS", Flags(work=work, **values))
        assert message(benchmark.main, ["benchmark"]) == line
    for shown in ({"work": ["mlp", "lenet-10"]}, {"work": []}, {"work": ["mlp"], "add": True}):
        device_list.refuse_flags(Flags(**shown, **values))


def test_the_time_of_the_items_needs_a_device(monkeypatch):
    monkeypatch.setattr(benchmark.flags, "FLAGS", Flags(device=None, list=False, seconds=1.0))
    line = "--seconds has no effect without --device; leave it out"
    assert message(benchmark.main, ["benchmark"]) == line
