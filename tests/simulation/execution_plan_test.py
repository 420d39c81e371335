"""How work is laid out: as usual or as is said, and recorded with the run."""

import json
import re
from types import SimpleNamespace

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import execution_plan
from fedjax_pfl.simulation.execution_plan import Plan

BASE = {
    "algorithm": "fedavg",
    "model": "lenet",
    "lenet": {"kernels": (2,), "dense": (4,)},
    "dataset": "synthetic",
    "synthetic": {"shape": (12, 12, 1), "examples": 60, "test_examples": 0},
    "partition": "iid",
    "clients": 5,
    "rounds": 2,
    "eval_every": 1,
    "devices": 1,
}


@pytest.mark.parametrize(
    ("cohort", "devices", "used"),
    [(None, None, 5), (3, None, 3), (1, None, 1), (1, 2, 2), (5, 1, 1)],
)
def test_a_core_without_a_client_is_no_device(cohort, devices, used):
    """Eight cores and five clients: the others help with products, and do not wait."""
    made = configuration.default()
    made.update(
        clients=5,
        partition="iid",
        clients_per_round=cohort,
        devices=devices,
        eval_every=1,
        phases=({"rounds": 1}, {"rounds": 1, "clients_per_round": 1}),
    )
    first, later = build.build(made).phases
    assert first.inputs.mesh is later.inputs.mesh  # one for the run: the state stays where it is
    assert first.inputs.devices == used


def test_accelerators_and_several_processes_keep_all_devices(monkeypatch):
    """An idle accelerator costs the others nothing, and each process has its part in a round."""
    there = [SimpleNamespace(platform="gpu")] * 4
    monkeypatch.setattr(execution_plan.multiprocess, "devices", lambda most: there[:most])
    monkeypatch.setattr(execution_plan.jax, "make_mesh", lambda shape, *_, **__: shape)
    assert execution_plan.mesh(None, 1, several=False) == (4,)
    there[:] = [SimpleNamespace(platform="cpu")] * 4
    assert execution_plan.mesh(None, 3, several=False) == (3,)
    monkeypatch.setattr(execution_plan.multiprocess, "count", lambda: 2)
    assert execution_plan.mesh(None, 3, several=False) == (4,)


@pytest.mark.parametrize(("processes", "advised"), [(1, True), (2, False)])
def test_one_device_is_advised_only_where_it_can_be_set(processes, advised, monkeypatch):
    """JAX 0.11 cannot compile several runs for several CPU devices; processes have one each."""
    there = [SimpleNamespace(platform="cpu")] * 4
    monkeypatch.setattr(execution_plan.multiprocess, "devices", lambda most: there[:most])
    monkeypatch.setattr(execution_plan.multiprocess, "count", lambda: processes)
    monkeypatch.setattr(execution_plan.jax, "__version_info__", (0, 11, 0))
    with pytest.raises(UsageError, match=r"run them one by one, or take JAX 0\.12") as error:
        execution_plan.mesh(4, 4, several=True)
    assert ("use devices=1" in str(error.value)) is advised
    if advised:
        assert execution_plan.mesh(1, 4, several=True) is None
    monkeypatch.setattr(execution_plan.jax, "make_mesh", lambda shape, *_, **__: shape)
    assert execution_plan.mesh(4, 4, several=False) == (4,)  # one by one
    monkeypatch.setattr(execution_plan.jax, "__version_info__", (0, 12, 0))
    assert execution_plan.mesh(4, 4, several=True) == (4,)


def test_lines_for_people():
    assert execution_plan.describe(Plan("auto", 8), 10, 2) == (
        "10 clients a round, 5 at a time on each of 2 devices, convolutions by auto"
    )
    assert execution_plan.describe(Plan("xla", 4), 1, 8) == (
        "1 client a round, 1 at a time on one device, convolutions by xla"
    )


@pytest.mark.slow("runs under several plans")
def test_a_run_goes_on_by_its_own_plan(tmp_path):
    told, base, directory = [], {**BASE, "rounds": 1}, tmp_path / "run"
    runner.run_all({**base, "chunk": 2, "conv": "patches"}, directory)
    path = directory / "plan.json"
    content = json.loads(path.read_text())
    assert content["phases"] == [{"conv": "patches", "chunk": 2}]
    same = runner.run_all(base, directory, tell=told.append)[""]
    assert same.phases[0].plan == Plan("patches", 2)
    method, plan, needs = told
    assert method.startswith("FedAvg, the method of McMahan et al. 2017; all settings of the ")
    assert plan == "5 clients a round, 2 at a time on one device, convolutions by patches"
    assert re.fullmatch(r"memory needed: at least device .*, disk .*; store=device", needs)
    other = runner.run({**base, "chunk": 1}, directory)
    assert other.phases[0].plan == Plan("patches", 1)
    for damaged in ("[", json.dumps({**content, "machine": "another"})):
        path.write_text(damaged)
        assert runner.run(base, directory).phases[0].plan == Plan("auto", 1)
    assert json.loads(path.read_text())["machine"] == content["machine"]


@pytest.mark.slow("runs under several plans")
def test_a_new_seed_is_laid_out_as_those_that_are_there(tmp_path):
    base = {**BASE, "rounds": 1, "seeds": 2}
    runner.run_all({**base, "seed": 1, "chunk": 2}, tmp_path)
    results = runner.run_all({**base, "seeds": 3}, tmp_path)
    assert {result.phases[0].plan for result in results.values()} == {Plan("auto", 2)}
