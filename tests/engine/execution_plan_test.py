"""How work is laid out: chosen by time, kept, recorded with the run, and left to who says it."""

import json
import re
from types import SimpleNamespace

import jax
import pytest

from fedjax_pfl.config import configuration
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine import execution_plan
from fedjax_pfl.engine.execution_plan import Plan
from fedjax_pfl.runs import build, runner

BASE = {
    "algorithm": "fedavg", "model": "lenet", "lenet": {"kernels": (2,), "dense": (4,)},
    "dataset": "synthetic", "synthetic": {"shape": (12, 12, 1), "examples": 60, "test_examples": 0},
    "partition": "iid", "clients": 5, "rounds": 2, "eval_every": 1, "devices": 1, "measure": True,
}  # fmt: skip


def chosen(seconds, usual=("auto", 1), chunks=(1, 4, 10), lowerings=("auto", "patches", "xla")):
    tried = []

    def taken(tried_plan):
        tried.append(tried_plan[:2])
        return seconds.get(tried_plan[:2])

    return execution_plan.fastest(Plan(*usual), chunks, lowerings, taken), tried


def test_the_fastest_chunk_and_then_the_fastest_lowering_with_it():
    seconds = {
        ("auto", 1): 1.0, ("auto", 4): 0.5, ("auto", 10): 0.6, ("patches", 4): 0.7,
        ("xla", 4): 0.4, ("xla", 10): 0.1,
    }  # fmt: skip
    found, tried = chosen(seconds)
    assert found == Plan("xla", 4, measured=True)
    assert tried == list(seconds)[:5]


def test_what_is_hardly_faster_is_not_worth_it():
    found, _ = chosen({("auto", 1): 1.0, ("auto", 4): 0.96, ("auto", 10): 0.951})
    assert found == Plan("auto", 1, measured=True)
    found, _ = chosen({("auto", 1): 1.0, ("auto", 4): 0.94, ("auto", 10): 0.93})
    assert found == Plan("auto", 10, measured=True)


def test_what_cannot_be_is_passed_over_even_if_it_is_the_usual():
    found, _ = chosen({("auto", 4): 2.0, ("xla", 4): 3.0}, usual=("auto", 10))
    assert found == Plan("auto", 4, measured=True)


def test_chunks_are_powers_of_four_and_all():
    assert [execution_plan.chunks(n) for n in (1, 2, 4, 5, 100)] == [
        [1], [1, 2], [1, 4], [1, 4, 5], [1, 4, 16, 64, 100],
    ]  # fmt: skip


def test_a_measurement_is_kept_and_a_damaged_file_is_nothing(tmp_path):
    assert execution_plan.kept(tmp_path, "a") is None
    execution_plan.keep(tmp_path, "a", Plan("xla", 4, True))
    execution_plan.keep(tmp_path, "b", Plan("auto", 1, True))
    assert execution_plan.kept(tmp_path, "a") == Plan("xla", 4, measured=True)
    assert {p.name for p in tmp_path.iterdir()} == {"plans.json"}
    for content in ("{", "[]", '{"a": 3}', '{"a": ["xla", "many", true]}'):
        (tmp_path / "plans.json").write_text(content)
        assert execution_plan.kept(tmp_path, "a") is None
    execution_plan.keep(tmp_path, "a", Plan("rows", 2, True))
    assert execution_plan.kept(tmp_path, "a") == Plan("rows", 2, measured=True)
    (tmp_path / "file").write_text("")
    execution_plan.keep(tmp_path / "file", "a", Plan("rows", 2, True))  # no folder: no error


@pytest.mark.parametrize(
    ("cohort", "devices", "used"),
    [(None, None, 5), (3, None, 3), (1, None, 1), (1, 2, 2), (5, 1, 1)],
)
def test_a_core_without_a_client_is_no_device(cohort, devices, used):
    """Eight cores and five clients: the others help with products, and do not wait."""
    made = configuration.default()
    made.update(
        clients=5, partition="iid", clients_per_round=cohort, devices=devices, eval_every=1,
        phases=({"rounds": 1}, {"rounds": 1, "clients_per_round": 1}),
    )  # fmt: skip
    first, later = build.build(made).phases
    assert first.work.mesh is later.work.mesh  # one for the run: the state stays where it is
    assert first.work.devices == used


def test_accelerators_and_several_processes_keep_all_devices(monkeypatch):
    """An idle accelerator costs the others nothing, and each process has its part in a round."""
    there = [SimpleNamespace(platform="gpu")] * 4
    monkeypatch.setattr(build.processes, "devices", lambda most: there[:most])
    monkeypatch.setattr(build.jax, "make_mesh", lambda shape, *_, **__: shape)
    assert build._mesh(None, 1) == (4,)
    there[:] = [SimpleNamespace(platform="cpu")] * 4
    assert build._mesh(None, 3) == (3,)
    monkeypatch.setattr(build.processes, "count", lambda: 2)
    assert build._mesh(None, 3) == (4,)


def test_lines_for_people():
    assert execution_plan.describe(Plan("auto", 8), 10, 2) == (
        "10 clients a round, 5 at a time on each of 2 devices, convolutions by auto (as usual; "
        "the setting measure tries others)"
    )
    assert execution_plan.describe(Plan("xla", 4, True), 1, 8) == (
        "1 client a round, 1 at a time on one device, convolutions by xla (measured here)"
    )
    assert execution_plan.describe(Plan("xla", 1, True), 3, 1) == (
        "3 clients a round, 1 at a time on one device, convolutions by xla (measured here)"
    )


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Times by plan in the place of real ones, and what was asked for."""
    asked = []

    def timed(rounds, points, data):
        asked.append(rounds)
        return 1.0 / len(asked)

    monkeypatch.setattr(execution_plan, "timed", timed)
    monkeypatch.setattr(execution_plan, "folder", lambda: tmp_path / "cache")
    return asked


def of(**changes):
    return build.build(configuration.complete({**BASE, **changes})).phases[0].plan


def test_each_kind_of_work_is_measured_once(clock):
    assert of() == Plan("xla", 5, measured=True)  # each is faster than the one before
    assert len(clock) == 3 + 5  # 1, 4, 5 clients, and five lowerings besides auto
    assert of() == Plan("xla", 5, measured=True)
    assert of(learning_rate=0.3, rounds=9) == Plan("xla", 5, measured=True)
    assert len(clock) == 8
    of(batch_size=7)
    assert len(clock) == 16
    assert of(measure=False) == Plan("auto", 1)


def test_what_is_set_stays(clock):
    assert of(conv="rows", chunk=2) == Plan("rows", 2)
    assert not clock  # nothing is left to measure
    assert of(chunk=2).chunk == 2
    assert of(conv="rows").conv == "rows"
    clock.clear()
    assert of(model="mlp").conv == "auto"  # it has no convolution
    assert len(clock) == 3


def test_another_budget_or_setting_of_the_method_is_another_kind_of_work(clock):
    of(chunk=None)
    count = len(clock)
    needed = re.search(r"about ([\d.]+) GB", refused(chunk=5, memory_gb=1e-6))
    tight = 0.99 * float(needed[1])
    assert "5 of 5 clients" in refused(chunk=5, memory_gb=tight)
    assert of(memory_gb=tight).chunk in (1, 4)  # although five were the fastest
    assert len(clock) > count
    count = len(clock)
    of(algorithm="fedem", fedem={"components": 2})
    of(algorithm="fedem", fedem={"components": 3})
    assert len(clock) >= count + 8


def refused(**changes):
    with pytest.raises(UsageError) as error:
        of(**changes)
    return str(error.value)


def test_what_cannot_be_timed_is_not_measured(clock, monkeypatch):
    monkeypatch.setattr(execution_plan, "timed", lambda *rest: None)
    assert of() == Plan("auto", 1)
    assert not (execution_plan.folder() / "plans.json").exists()


def test_a_run_goes_on_by_its_own_plan(clock, tmp_path):
    told, base, directory = [], {**BASE, "rounds": 1}, tmp_path / "run"
    runner.run_all({**base, "chunk": 2, "conv": "patches", "measure": False}, directory)
    path = directory / "plan.json"
    content = json.loads(path.read_text())
    assert content["phases"] == [{"conv": "patches", "chunk": 2, "measured": False}]
    same = runner.run({**base, "measure": False}, directory)
    assert (same.phases[0].plan, clock) == (Plan("patches", 2), [])
    runner.run_all(base, directory, tell=told.append)  # measure is asked for now
    assert told == [
        "5 clients a round, 5 at a time on one device, convolutions by xla (measured here)"
    ]
    clock.clear()
    again = runner.run(base, directory)
    assert (again.phases[0].plan, clock) == (Plan("xla", 5, measured=True), [])
    other = runner.run({**base, "chunk": 1, "measure": False}, directory)
    assert other.phases[0].plan == Plan("xla", 1)
    for damaged in ("[", json.dumps({**content, "machine": "another"})):
        path.write_text(damaged)
        usual = runner.run({**base, "measure": False}, directory)
        assert usual.phases[0].plan == Plan("auto", 1)
    assert json.loads(path.read_text())["machine"] == content["machine"]


def test_a_new_seed_is_laid_out_as_those_that_are_there(tmp_path):
    base = {**BASE, "rounds": 1, "measure": False, "seeds": 2}
    runner.run_all({**base, "seed": 1, "chunk": 2}, tmp_path)
    results = runner.run_all({**base, "seeds": 3}, tmp_path)
    assert {result.phases[0].plan for result in results.values()} == {Plan("auto", 2)}


def test_a_round_is_really_timed():
    built = build.build(configuration.complete({**BASE, "model": "mlp", "measure": False}))
    (phase,) = built.phases
    assert 0 < execution_plan.timed(phase.rounds, phase.points, built.data) < 60

    def fails(error):
        def init(key):
            raise error

        return execution_plan.timed(phase.rounds._replace(init=init), phase.points, built.data)

    assert fails(UsageError("no groups")) is None
    assert fails(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fails(jax.errors.JaxRuntimeError("INTERNAL: broken"))
