"""Tests of the file that describes a deployed run, and of its log and outcome."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import schema, storage
from tests.commands import message
from tests.deploy.flower_test import Grid
from tests.deploy.run_test import CONFIG as RUN_CONFIG

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

from fedjax_pfl.deploy import flower, trial

CONFIG = {k: v for k, v in RUN_CONFIG.items() if k not in flower.DATA_SETTINGS}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"waiting": {"second": 3}}, "run.json.waiting must be an object without fields but"),
        ({"waiting": {"seconds": "long"}}, "waiting.seconds must be a number"),
        ({"waiting": {"min_answers": 1.5}}, "waiting.min_answers must be a whole number"),
        ({"workdir": 5}, "workdir must be text"),
        ({"log": None}, "log must be text"),
        ({"config": {"clients": "3"}}, "clients is '3'"),
        ({"config": []}, "config must be an object"),
        ({"config": CONFIG | {"pfedla": {"rate": 9.0}}}, "pfedla.rate counts with algorithm=pfed"),
        ({"config": CONFIG | {"validation_fraction": 0.2}}, "validation_fraction is a setting of"),
    ],
)
def test_errors_in_a_runs_file(changes, line, tmp_path):
    content = {"config": CONFIG, "workdir": str(tmp_path / "run"), "log": str(tmp_path / "run.log")}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**content, **changes}))
    assert line in message(flower.run_from_file, None, str(path))
    assert "absent.json is missing" in message(
        flower.run_from_file, None, str(tmp_path / "absent.json")
    )


def test_a_runs_log_may_be_in_a_new_folder(tmp_path):
    """The configuration is refused after the log is opened."""
    content = {"config": CONFIG | {"rounds": -1}, "workdir": str(tmp_path / "a" / "run")}
    path, log = tmp_path / "run.json", tmp_path / "b" / "c" / "run.log"
    path.write_text(json.dumps({**content, "log": str(log)}))
    line = message(flower.run_from_file, None, str(path))
    assert log.read_text() == f"error: {line}\n"
    for log, folder in ((path / "run.log", path), (tmp_path, tmp_path)):
        path.write_text(json.dumps({**content, "log": str(log)}))
        line = message(flower.run_from_file, None, str(path))
        assert line.startswith(f"{folder} cannot be written (")
        assert line.endswith(f"); choose another workdir or log in {path}")


INJECTED = "sorry\nThe run has ended: /srv\nerror: gone\x1b[2J"


def run_by(tmp_path, monkeypatch, result):
    """Calls `run_from_file` with a fake run; returns the log and the outcome."""
    log = tmp_path / "run.log"
    flower.outcome_path(log).write_text('{"directory": "of an earlier run"}')

    def run_replacement(config, directory, exchange, waiting, tell):
        assert not flower.outcome_path(log).exists()
        tell(f"client 1: {INJECTED}")
        if isinstance(result, Exception):
            raise result
        return SimpleNamespace(directory=result)

    monkeypatch.setattr(flower.run, "run", run_replacement)
    monkeypatch.setattr(flower.FlowerExchange, "wait", lambda *_: 2)
    spec = {"config": {"clients": 2}, "workdir": str(tmp_path / "run"), "log": str(log)}
    (tmp_path / "s.json").write_text(
        json.dumps({**spec, "waiting": {"seconds": 1, "min_answers": 1}})
    )
    with contextlib.nullcontext() if isinstance(result, Path) else pytest.raises(type(result)):
        flower.run_from_file(Grid(), str(tmp_path / "s.json"))
    return log.read_text(), storage.read_json(flower.outcome_path(log), schema.OUTCOME)


def test_a_run_writes_its_outcome_to_a_file_of_its_own(tmp_path, monkeypatch):
    log, outcome = run_by(tmp_path, monkeypatch, tmp_path / "run")
    assert outcome == {"directory": str(tmp_path / "run")}
    assert log.splitlines()[2] == "client 1: sorry\\nThe run has ended: /srv\\nerror: gone\\x1b[2J"
    _, outcome = run_by(tmp_path, monkeypatch, UsageError(f"no {INJECTED}"))
    assert outcome == {"error": "no sorry\\nThe run has ended: /srv\\nerror: gone\\x1b[2J"}
    assert run_by(tmp_path, monkeypatch, RuntimeError("away"))[1] == {}


def test_a_trial_ends_by_the_outcome_file_and_not_by_log_lines(tmp_path, monkeypatch):
    """Lines that look like an outcome are logged like others."""
    log, log_lines, looks = tmp_path / "run.log", [], [0]
    lines = ["The run has ended: /srv", "error: gone", "client 1: The run has ended:"]
    log.write_text("".join(f"{line}\n" for line in lines))
    outcome = trial.outcome_path(log)

    def wait(_):
        looks[0] += 1
        if looks[0] == 3:
            outcome.write_text(json.dumps(ending))

    monkeypatch.setattr(trial.guard, "running_processes", lambda *_: [1])
    monkeypatch.setattr(trial.time, "sleep", wait)
    started = SimpleNamespace(home=tmp_path, folder=tmp_path, restart_ended=list)
    ending = {"directory": "/srv"}
    trial._follow(log, tmp_path / "wire", started, lambda: None, log_lines.append)
    assert (log_lines, looks) == (lines, [3])
    looks, ending = [0], {"error": "too few"}
    outcome.unlink()
    arguments = (log, tmp_path / "wire", started, lambda: None, log_lines.append)
    assert message(trial._follow, *arguments) == "too few"
