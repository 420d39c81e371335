"""Directories that are refused, and those that a run can no longer write to."""

import asyncio
import errno
import gc
import logging
import os
import resource
import shutil
import sys
from pathlib import Path

import jax
import orbax.checkpoint
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, run_directory, runner
from fedjax_pfl.simulation import execution_plan
from tests.runs.common import BASE, assert_same_run, but_evaluations, contents, undisturbed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


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
    assert "choose another workdir" in line


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
    assert "cannot name a directory" in refused(BASE, tmp_path / "a\0b")
    for text in ("{", "[1]", "null", '"x"', "\udcff"):
        (foreign / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        assert "is damaged" in refused(BASE, foreign)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"machine": ' + '{"a":' * 100_000, "[]", "3", ""])
def test_a_plan_that_no_run_writes_is_made_anew(text, tmp_path):
    """However deep: results do not hang on it."""
    (tmp_path / "plan.json").write_text(text)
    assert run_directory.read_plans(tmp_path) is None


@pytest.mark.parametrize(
    "plan",
    [{"conv": "auto", "chunk": "x"}, {"conv": "auto", "chunk": 0}, {"conv": "x", "chunk": 1}],
)
def test_a_plan_with_values_that_no_run_has_is_made_anew(plan, tmp_path):
    run_directory.write_json(
        tmp_path / "plan.json", {"machine": execution_plan.machine(), "phases": [plan]}
    )
    assert run_directory.read_plans(tmp_path) is None


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
    with run_directory.claim(tmp_path, {"seed": 0}) as directory:
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
    with run_directory.claim(directory, finished[0].config):
        assert "in use by another process" in refused(BASE, directory)
    assert runner.run(BASE, directory).resumed_at == 6


def test_where_there_are_no_locks_a_run_goes_on(finished, tmp_path, monkeypatch, capsys):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)

    def unknown(*args):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(run_directory.fcntl, "flock", unknown)
    assert runner.run(BASE, directory).resumed_at == 6
    assert "cannot be locked (Bad file descriptor)" in capsys.readouterr().err


# What happens to a directory while its run is going on.


def stopped(directory, patch, owner, name, what):
    """The line that a run ends with when `what` happens at the third call of a function."""
    real, calls = getattr(owner, name), []

    def third(*arguments, **named):
        calls.append(1)
        if len(calls) == 3:
            what()
        return real(*arguments, **named)

    with patch.context() as here:
        here.setattr(owner, name, third)
        with pytest.raises(UsageError) as caught:
            runner.run(BASE, directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only():
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize(
    ("owner", "name", "what", "words", "saved"),
    [
        (run_directory, "append_metrics", full, "No space left on device", 5),
        (run_directory, "append_metrics", read_only, "Read-only file system", 5),
        (checkpoints.Store, "save", full, "No space left on device", 2),
        (run_directory, "write_clients", full, "", 6),
    ],
)
def test_a_disk_that_is_full_stops_the_run_with_a_line(
    owner, name, what, words, saved, tmp_path, monkeypatch, capsys
):
    directory = tmp_path / "run"
    if name == "write_clients":  # it is called once: at the end
        with monkeypatch.context() as here:
            here.setattr(run_directory, name, lambda *arguments: what())
            with pytest.raises(UsageError) as caught:
                runner.run(BASE, directory)
        line = str(caught.value)
    else:
        line = stopped(directory, monkeypatch, owner, name, what)
    assert words in line
    assert f"its checkpoint of round {saved} is intact" in line
    assert ("make it writable" if what is read_only else "free space on its disk") in line
    assert but_evaluations(capsys.readouterr().err) == []
    result = runner.run(BASE, directory)
    assert result.resumed_at == saved
    assert_same_run(result, undisturbed(BASE), directory)


def test_what_a_file_system_refuses_orbax_ends_with_a_line_too(tmp_path, monkeypatch, capfd):
    """Files of a checkpoint may not be longer than a few bytes; some are written in C++."""
    directory = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        line = stopped(
            directory,
            monkeypatch,
            orbax.checkpoint.CheckpointManager,
            "save",
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1])),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written (File too large)" in line
    assert "its checkpoint of round 2 is intact" in line
    assert but_evaluations(capfd.readouterr().err) == []
    assert {p.name for p in (directory / "checkpoints").iterdir()} == {"1", "2"}
    result = runner.run(BASE, directory)
    assert result.resumed_at == 2
    assert_same_run(result, undisturbed(BASE), directory)


def test_what_asyncio_says_of_a_save_that_failed_is_not_shown(tmp_path):
    """A failed write, also raised by the save, stays in a future that nobody asks; others' are."""
    checkpoints.open_store(tmp_path)
    logger, told, loop = logging.getLogger("asyncio"), [], asyncio.new_event_loop()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    try:
        for path in ("2.orbax-checkpoint-tmp/state", "thesis.tex"):
            loop.create_future().set_exception(ValueError(f"cannot write {path}: No space left"))
        gc.collect()
    finally:
        logger.removeHandler(handler)
        loop.close()
    (only,) = told
    assert "thesis.tex" in only


@pytest.mark.parametrize("name", ["append_metrics", "save"])
def test_a_directory_that_goes_away_is_named(name, tmp_path, monkeypatch):
    directory, aside = tmp_path / "run", tmp_path / "aside"
    owner = run_directory if name == "append_metrics" else checkpoints.Store
    line = stopped(directory, monkeypatch, owner, name, lambda: directory.rename(aside))
    assert f"{directory} was removed or moved during its run" in line
    assert "put it back and repeat the command or call" in line
    shutil.rmtree(directory, ignore_errors=True)
    aside.rename(directory)
    result = runner.run(BASE, directory)
    assert result.resumed_at in (2, 5)
    assert_same_run(result, undisturbed(BASE), directory)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9")],
)
def test_too_little_memory_is_one_line(error, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(runner, "train", fail)
    with pytest.raises(UsageError, match=r"too little memory .*go on with a smaller chunk"):
        runner.run(BASE)
    monkeypatch.setattr(runner, "train", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.run(BASE)


# What a run reads is data, and never a program.

_unpickled = []


def _audit(event, arguments):
    if event == "pickle.find_class":
        _unpickled.append(str(arguments))


def test_a_run_and_its_resumption_unpickle_nothing(finished, tmp_path):
    directory = tmp_path / "run"
    sys.addaudithook(_audit)
    shutil.copytree(finished[1], directory)
    shutil.rmtree(directory / "checkpoints" / "6")
    (directory / "report.html").unlink()
    assert runner.run(BASE, directory).resumed_at == 5
    assert _unpickled == []
    for path, content in contents(directory).items():
        assert not content.startswith((b"\x80\x04", b"\x80\x05")), path
