"""Directories that are refused."""

import os
import shutil
from pathlib import Path

import pytest

from fedjax_pfl import rundir, runner
from fedjax_pfl.errors import UsageError
from tests.runs.common import BASE, contents


def refused(config, directory):
    before = contents(directory.parent) if directory.parent.is_dir() else None
    with pytest.raises(UsageError) as caught:
        runner.run(config, directory)
    if before is not None:
        assert contents(directory.parent) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_runs_directory_is_refused_with_what_differs(finished, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    line = refused({**BASE, "seed": 1, "mlp": {"hidden": (4, 2)}}, directory)
    assert "seed (0 there, 1 here)" in line
    assert "mlp.hidden ([4] there, [4, 2] here)" in line
    assert "rounds" not in line
    assert "--workdir" in line


def test_neutral_settings_may_change(finished, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    changed = {**BASE, "data_dir": "elsewhere", "checkpoint_every": 3, "chunk": 2}
    assert runner.run(changed, directory).resumed_at == 6


def test_directories_that_hold_something_else_are_refused(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    assert "is not empty" in refused(BASE, foreign)
    assert "is not empty" in refused(BASE, foreign / "thesis.tex")
    assert "cannot be used" in refused(BASE, foreign / "thesis.tex" / "below")
    for text in ("{", "[1]", "null", '"x"', "\udcff"):
        (foreign / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        assert "is damaged" in refused(BASE, foreign)


def test_directories_that_cannot_be_written_are_refused(finished, tmp_path, monkeypatch):
    assert "cannot be used" in refused(BASE, tmp_path / ("long" * 100))

    def no(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", no)
        assert "(Permission denied)" in refused(BASE, tmp_path / "new")
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written" in refused(BASE, directory)


def test_what_a_kill_before_the_first_file_leaves_is_no_obstacle(tmp_path):
    (tmp_path / "config.json.part").write_text("{")
    with rundir.claimed(tmp_path, {"seed": 0}) as directory:
        assert directory == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_configuration_that_cannot_be_leaves_no_directory(tmp_path):
    assert "batch_size" in refused({**BASE, "batch_size": 0}, tmp_path / "new")
    wrong = {**BASE, "phases": ({"algorithm": "local"}, {"algorithm": "fedavg"})}
    assert "global model" in refused(wrong, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused(finished, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    with rundir.claimed(directory, finished[0].config):
        assert "in use by another process" in refused(BASE, directory)
    assert runner.run(BASE, directory).resumed_at == 6


def test_where_there_are_no_locks_a_run_goes_on(finished, tmp_path, monkeypatch, capsys):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)

    def unknown(*args):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(rundir.fcntl, "flock", unknown)
    assert runner.run(BASE, directory).resumed_at == 6
    assert "cannot be locked (Bad file descriptor)" in capsys.readouterr().err
