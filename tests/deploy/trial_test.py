"""A trial over Flower that is interrupted by each signal and resumes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from absl import flags

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import guard, run, schema
from fedjax_pfl.presets import pfedla
from fedjax_pfl.runs import export, runner
from tests.commands import message, run_here
from tests.deploy.run_test import assert_close
from tests.runs.common import read_metrics

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

from flwr.common.config import parse_config_args

from fedjax_pfl.deploy import trial

ROUNDS, NODES, LIMIT = 4, 2, 400.0
ARGUMENTS = ("--config=pfedla:digits", f"--nodes={NODES}")
CHANGES = {"rounds": ROUNDS, "eval_every": 1, "model": "mlp", "clients": NODES}


def command(folder):
    settings = [f"--config.{name}={value}" for name, value in CHANGES.items()]
    places = [f"--workdir={folder / 'real'}", f"--folder={folder / 'nodes'}"]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.deploy", *ARGUMENTS, *settings, *places],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def evaluations(folder):
    path = folder / "real" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def interrupt_trial(folder, number, after):
    """Interrupts a trial after some evaluations; returns its output."""
    process, until = command(folder), time.monotonic() + LIMIT
    try:
        while evaluations(folder) < after:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)
        assert guard.running_processes(folder / "nodes" / "flwr")
        os.kill(process.pid, number)
        output = process.communicate(timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while guard.running_processes(folder / "nodes" / "flwr"):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert evaluations(folder) < ROUNDS
    return output


def test_paths_in_flowers_configuration(tmp_path):
    for name in ("with a space", "ü", "😀", "a'b"):
        folder = tmp_path / name
        folder.mkdir()
        home = trial._write_flower_home(folder, folder / "ca.crt", 8000)
        content = tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))
        certificate = content["superlink"]["trial"]["root-certificates"]
        assert certificate == str(folder / "ca.crt")
        run_config = parse_config_args([f"settings={trial._toml_text(folder / 'settings.json')}"])
        assert run_config == {"settings": str(folder / "settings.json")}


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_other_clients_than_nodes_are_refused():
    arguments = "deploy", "--config=baseline:digits", "--config.clients=6"
    line = "config.clients is 6, and there are 4 nodes, one for each client; give --nodes=6"
    assert message(run_here, *arguments) == line


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
@pytest.mark.parametrize("name", ["test_fraction=0.5", "classes.per_client=2"])
def test_settings_of_data_that_only_the_files_of_nodes_decide_are_refused(name):
    arguments = "deploy", "--config=baseline:digits", "--nodes=1", "--data=node.json"
    line = message(run_here, *arguments, f"--config.{name}")
    key = name.partition("=")[0]
    assert line.startswith(f"--config.{key} is a setting of data, which the files of --data")


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_settings_without_effect_are_refused():
    arguments = "deploy", "--config=baseline:digits", "--config.fedprox.mu=3.0"
    assert message(run_here, *arguments).startswith("fedprox.mu counts with algorithm=fedprox only")


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_a_data_dir_beside_files_of_nodes_is_refused():
    arguments = "deploy", "--config=baseline:digits", "--nodes=1", "--data=a.json", "--data_dir=b"
    assert message(run_here, *arguments).startswith("--data_dir has no effect with --data")


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    arguments = "deploy", "--config=baseline:digits", "--nodes=1", f"--folder={tmp_path / 'file'}"
    line = message(run_here, *arguments, f"--workdir={tmp_path / 'run'}")
    assert line == f"{tmp_path / 'file'} cannot be used (File exists); choose --folder"


def test_a_finished_run_of_other_data_is_refused(tmp_path):
    """It asks no node, so no node can refuse."""
    (tmp_path / "node-0.json").write_text(json.dumps({"client": 0, "dataset": "digits"}))
    for content, is_refused in (
        ({"client": 0, "dataset": "digits", "data_dir": "/elsewhere"}, False),
        ({"client": 0, "dataset": "wine"}, True),
    ):
        trial._check_data_of_finished_run(tmp_path / "run", tmp_path, [content])
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "report.html").touch()
        with pytest.raises(UsageError) if is_refused else contextlib.nullcontext() as error:
            trial._check_data_of_finished_run(tmp_path / "run", tmp_path, [content])
        (tmp_path / "run" / "report.html").unlink()
    assert "holds a finished run in which client 0 had other data; choose another" in str(
        error.value
    )


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_a_limit_that_the_server_would_refuse_is_refused_at_once():
    """The server's app ended without an outcome, and was started again for minutes."""
    with pytest.raises(flags.IllegalFlagValueError):
        run_here("deploy", "--config=baseline:digits", "--round_seconds=inf")


@pytest.mark.slow("it starts Flower four times, which takes minutes")
def test_an_interrupted_trial_resumes_and_equals_the_simulation(tmp_path):
    config = pfedla.get_config("digits")
    config.update(CHANGES)
    simulated, starts = runner.run(config, tmp_path / "simulated"), []
    for after, number in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGINT), start=1):
        output = interrupt_trial(tmp_path, number, after)
        assert "Traceback" not in output
        assert ("give the same command again" in output) == (number != signal.SIGKILL)
        starts.append(
            run.storage.read_json(tmp_path / "real" / run.DEPLOYED_FILE, schema.DEPLOYED)["start"]
        )
    last = command(tmp_path)
    output = last.communicate(timeout=LIMIT)[0]
    assert last.returncode == 0, output
    assert guard.running_processes(tmp_path / "nodes" / "flwr") == []
    assert_close(read_metrics(tmp_path / "real"), simulated.metrics)
    lines = [
        json.loads(line) for line in (tmp_path / "real" / run.WIRE_FILE).read_text().splitlines()
    ]
    assert len({line["round"] for line in lines}) == len(lines) == ROUNDS
    assert sum(line["ledger_up"] for line in lines) == simulated.ledger.total_up
    keys = run.storage.read_json(tmp_path / "real.keys.json", schema.KEYS)
    assert len(set(keys.values())) == NODES
    assert starts == sorted(set(starts))
    traffic = [(tmp_path / name / "traffic.json").read_text() for name in ("real", "simulated")]
    assert traffic[0] == traffic[1]
    for i in range(NODES):
        (path,) = (tmp_path / "nodes" / f"node-{i}").glob("run-*/model.safetensors")
        assert export.describe(path)["client"] == i
