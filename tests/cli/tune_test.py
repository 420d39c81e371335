"""Tests of the command tune: its presets and its signals."""

import pytest

from fedjax_pfl.runs import interrupt
from fedjax_pfl.runs.tuning import trials
from tests.commands import run_here


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
