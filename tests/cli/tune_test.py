"""Tests of the command tune: its presets and its signals."""

import pytest

from fedjax_pfl.runs import interrupt
from fedjax_pfl.runs.tuning import search, trials
from tests.commands import message, run_here


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_a_signal_stops_the_command_after_its_tables(tmp_path, monkeypatch, capsys):
    def stopped(planned, seeds, folder, max_runs, stop):
        assert stop.caller == "command"
        raise interrupt.Stopped(1, 143, stop.caller)

    monkeypatch.setattr(trials, "run", stopped)
    settings = ["--config.validation_fraction=.2", "--grid=learning_rate=.1,.2"]
    with pytest.raises(interrupt.Stopped, match="run the same command again"):
        run_here("tune", *settings, f"--out={tmp_path}")
    assert "its runs are missing" in capsys.readouterr().out
    assert (tmp_path / "tune.txt").is_file()


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_a_seed_of_sampling_needs_a_budget():
    line = "--budget_seed has no effect without --budget; leave it out"
    assert message(run_here, "tune", "--grid=learning_rate=.1,.2", "--budget_seed=4") == line


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_the_tables_need_a_folder(tmp_path):
    (file := tmp_path / "file").touch()
    settings = ["--config.validation_fraction=.2", "--grid=learning_rate=.1,.2"]
    line = f"{file} is a file; choose a folder for the runs and tables"
    assert message(run_here, "tune", *settings, "--only_show", f"--out={file}") == line


PRESETS = """
from ml_collections import ConfigDict

def get_config(preset="x"):
    config = ConfigDict({"rounds": 3, "validation_fraction": 0.2, "clients": 4})
    config.algorithm = preset.partition("-")[2] or "fedavg"
    config.learning_rate = 0.5 if preset == "x-pfedla" else 0.1
    LINE
    return config.lock()
"""


def planned_trials(tmp_path, monkeypatch, *arguments, line="pass"):
    """Returns the trials of pfedla and fedavg that the command plans for a user's file."""
    planned, file = [], tmp_path / "own.py"
    file.write_text(PRESETS.replace("LINE", line))
    monkeypatch.setattr(search, "run_search", lambda trials, **_: planned.extend(trials))
    methods = ["--methods=pfedla,fedavg", "--grid=momentum=0,.9"]
    run_here("tune", f"--config={file}:x", *methods, *arguments)
    return planned


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
def test_presets_of_a_file_may_leave_settings_out(tmp_path, monkeypatch):
    planned = planned_trials(tmp_path, monkeypatch, "--config.clients=5")
    assert {trial.method: trial.config.learning_rate for trial in planned} == {
        "pfedla": 0.5,
        "fedavg": 0.1,
    }
    for trial in planned:
        assert (trial.config.clients, trial.config.rounds, trial.config.batch_size) == (5, 3, 32)


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
@pytest.mark.parametrize("setting", ["reference=True", "reference_runs=runs/a"])
def test_reference_runs_are_refused(setting, monkeypatch):
    monkeypatch.setattr(search, "run_search", lambda *_, **__: pytest.fail("it runs"))
    settings = [f"--config.{setting}", "--config.validation_fraction=.2"]
    line = message(run_here, "tune", *settings, "--grid=learning_rate=.1,.2")
    name = setting.partition("=")[0]
    assert line == f"the setting {name} cannot be combined with a grid; leave {name} out"


@pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files
@pytest.mark.parametrize("condition", ["preset == 'x'", "preset == 'x-pfedla'"])
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("config.learning_rte = 0.1", "no setting learning_rte; did you mean learning_rate?"),
        ("config.rounds = None", "rounds is None; it must be of type int"),
        ("config.groups = None", "groups is None; it must be of type tuple"),
    ],
)
def test_wrong_settings_in_a_file_are_refused(condition, setting, text, tmp_path, monkeypatch):
    line = f"if {condition}: {setting}"
    assert text in message(lambda: planned_trials(tmp_path, monkeypatch, line=line))
