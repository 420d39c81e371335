"""Tests of execution plans: devices, chunks and the plan that a run records."""

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
def test_cpu_devices_are_at_most_the_clients_of_a_round(cohort, devices, used):
    """Eight cores and five clients; an explicit number of devices is kept."""
    config = configuration.default()
    config.update(
        clients=5,
        partition="iid",
        clients_per_round=cohort,
        devices=devices,
        eval_every=1,
        phases=({"rounds": 1}, {"rounds": 1, "clients_per_round": 1}),
    )
    first, second = build.build(config).phases
    assert first.inputs.mesh is second.inputs.mesh  # all phases use the same devices
    assert first.inputs.devices == used


@pytest.fixture
def set_devices(monkeypatch):
    """Returns a function that imitates four devices in one or more processes."""

    def set_devices(platform, processes=1, version=(0, 12, 0)):
        devices = [SimpleNamespace(platform=platform)] * 4
        monkeypatch.setattr(execution_plan.multiprocess, "devices", lambda most: devices[:most])
        monkeypatch.setattr(execution_plan.multiprocess, "count", lambda: processes)
        monkeypatch.setattr(execution_plan.jax, "make_mesh", lambda shape, *_, **__: shape)
        monkeypatch.setattr(execution_plan.jax, "__version_info__", version)
        monkeypatch.setattr(execution_plan.jax, "__version__", ".".join(map(str, version)))

    return set_devices


def test_accelerators_and_several_processes_use_all_devices(set_devices):
    set_devices("gpu")
    assert execution_plan.mesh(None, 1, several=False) == (4,)
    set_devices("cpu")
    assert execution_plan.mesh(None, 3, several=False) == (3,)
    assert execution_plan.mesh(None, 1, several=False) is None
    set_devices("cpu", processes=2)
    assert execution_plan.mesh(None, 3, several=False) == (4,)


@pytest.mark.parametrize("processes", [1, 2])
def test_several_runs_on_several_cpu_devices_need_jax_0_12(processes, set_devices):
    """JAX 0.11 ends the process; only a single process can use one device instead."""
    set_devices("cpu", processes, (0, 11, 2))
    line = r"JAX 0\.11\.2 cannot compile several runs .*run them one by one, or take JAX 0\.12"
    with pytest.raises(UsageError, match=line) as error:
        execution_plan.mesh(4, 4, several=True)
    assert ("use devices=1" in str(error.value)) == (processes == 1)
    if processes == 1:
        assert execution_plan.mesh(1, 4, several=True) is None
        assert execution_plan.mesh(None, 4, several=True) is None
    assert execution_plan.mesh(4, 4, several=False) == (4,)
    set_devices("cpu", processes)
    assert execution_plan.mesh(4, 4, several=True) == (4,)


def test_plans_are_described_in_one_line():
    assert execution_plan.describe(Plan("auto", 8), 10, 2) == (
        "10 clients a round, 5 at a time on each of 2 devices, convolutions chosen per layer"
    )
    assert execution_plan.describe(Plan("xla", 4), 1, 8) == (
        "1 client a round, 1 at a time on one device, convolutions by xla"
    )


@pytest.mark.slow("runs under several plans")
def test_a_run_resumes_with_its_recorded_plan(tmp_path):
    messages, base, directory = [], {**BASE, "rounds": 1}, tmp_path / "run"
    runner.run_all({**base, "chunk": 2, "conv": "patches"}, directory)
    path = directory / "plan.json"
    content = json.loads(path.read_text())
    assert content["phases"] == [{"conv": "patches", "chunk": 2}]
    resumed = runner.run_all(base, directory, tell=messages.append)[""]
    assert resumed.phases[0].plan == Plan("patches", 2)
    method, plan, memory = messages
    assert method.startswith(
        "FedAvg, the method of McMahan et al. 2017; changed from the defaults: "
    )
    assert plan == "5 clients a round, 2 at a time on one device, convolutions by patches"
    assert re.fullmatch(r"memory needed: at least .* kB \(client state on the device\)", memory)
    changed = runner.run({**base, "chunk": 1}, directory)
    assert changed.phases[0].plan == Plan("patches", 1)
    for damaged in ("[", json.dumps({**content, "machine": "another"})):
        path.write_text(damaged)
        assert runner.run(base, directory).phases[0].plan == Plan("auto", 1)
    assert json.loads(path.read_text())["machine"] == content["machine"]


@pytest.mark.slow("runs under several plans")
def test_a_new_seed_uses_the_plan_of_existing_seeds(tmp_path):
    base = {**BASE, "rounds": 1, "seeds": 2}
    runner.run_all({**base, "seed": 1, "chunk": 2}, tmp_path)
    results = runner.run_all({**base, "seeds": 3}, tmp_path)
    assert {result.phases[0].plan for result in results.values()} == {Plan("auto", 2)}
