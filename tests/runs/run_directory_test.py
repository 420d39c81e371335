"""Tests of directories that are refused, and of failures to write during a run."""

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
from tests.commands import message
from tests.runs.common import (
    BASE,
    assert_resumes,
    assert_same_run,
    at_call,
    contents,
    kill,
    other_lines,
    refusal,
    undisturbed,
)

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


def test_a_directory_of_another_run_is_refused_with_the_differences(copied):
    line = refusal({**BASE, "seed": 1, "mlp": {"hidden": (4, 2)}}, copied)
    assert "seed (0 there, 1 here)" in line
    assert "mlp.hidden ([4] there, [4, 2] here)" in line
    assert "rounds" not in line
    assert "choose another workdir" in line


def test_a_run_that_ends_before_its_first_evaluation_leaves_a_free_directory(tmp_path):
    with kill(runner, "_execute", lambda *_: True):
        runner.run({**BASE, "batch_size": 4}, tmp_path)
    assert {"config.json", "plan.json"} <= {p.name for p in tmp_path.iterdir()}
    assert_same_run(runner.run(BASE, tmp_path), undisturbed(BASE), tmp_path)


def test_resumable_settings_may_change(copied):
    changed = {**BASE, "data_dir": "elsewhere", "checkpoint_every": 3, "chunk": 2}
    assert runner.run(changed, copied).resumed_at == 6


def test_directories_with_other_content_are_refused(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    assert "is not empty" in refusal(BASE, foreign)
    assert "is not empty" in refusal(BASE, foreign / "thesis.tex")
    assert "cannot be used" in refusal(BASE, foreign / "thesis.tex" / "below")
    assert "cannot name a directory" in refusal(BASE, tmp_path / "a\0b")
    for text in ("{", "[1]", "null", '"x"', "\udcff"):
        (foreign / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        assert "is damaged" in refusal(BASE, foreign)


PLANS = [{"conv": "auto", "chunk": "x"}, {"conv": "auto", "chunk": 0}, {"conv": "x", "chunk": 1}]


@pytest.mark.parametrize(
    "plan", ["[" * 100_000, '{"machine": ' + '{"a":' * 100_000, "[]", "3", "", *PLANS]
)
def test_a_damaged_plan_is_ignored(plan, tmp_path):
    (tmp_path / "clients.csv").touch()
    if isinstance(plan, str):
        (tmp_path / "plan.json").write_text(plan)
    else:
        plans = {"machine": execution_plan.machine(), "phases": [plan]}
        run_directory.write_json(tmp_path / "plan.json", plans)
    assert run_directory.read_plans(tmp_path) is None


def test_the_plan_of_a_run_without_results_is_ignored(tmp_path):
    plan = execution_plan.Plan(conv="rows", chunk=2)
    run_directory.write_plans(tmp_path, [plan])
    assert run_directory.read_plans(tmp_path) is None
    (tmp_path / "clients.csv").touch()
    assert run_directory.read_plans(tmp_path) == [plan]


def fail(error):
    raise error


def test_unwritable_directories_are_refused(copied, tmp_path, monkeypatch):
    assert "cannot be used" in refusal(BASE, tmp_path / ("long" * 100))
    denied = PermissionError(13, "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *args, **kwargs: fail(denied))
        assert "(Permission denied)" in refusal(BASE, tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written" in refusal(BASE, copied)


def test_a_partial_first_file_is_ignored(tmp_path):
    (tmp_path / "config.json.part").write_text("{")
    with run_directory.claim(tmp_path, {"seed": 0}) as directory:
        assert directory == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_an_invalid_configuration_creates_no_directory(tmp_path):
    assert "batch_size" in refusal({**BASE, "batch_size": 0}, tmp_path / "new")
    invalid = {**BASE, "phases": ({"algorithm": "local"}, {"algorithm": "fedavg"})}
    assert "global model" in refusal(invalid, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_locked_directory_is_refused(finished, copied):
    with run_directory.claim(copied, finished[0].config):
        assert "in use by another process" in refusal(BASE, copied)
    assert runner.run(BASE, copied).resumed_at == 6


def test_a_file_system_without_locks_gives_a_warning(copied, monkeypatch, capsys):
    error = OSError(9, "Bad file descriptor")
    monkeypatch.setattr(run_directory.fcntl, "flock", lambda *args: fail(error))
    assert runner.run(BASE, copied).resumed_at == 6
    assert "cannot be locked (Bad file descriptor)" in capsys.readouterr().err


# Failures during a run.


def stopped(directory, owner, name, call, failure):
    """Returns the last line of a run where a function call fails."""
    function, is_last = getattr(owner, name), at_call(call)

    def failing(*arguments, **keywords):
        if is_last():
            failure()
        return function(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing)
        return message(runner.run, BASE, directory)


@pytest.mark.parametrize(
    ("owner", "name", "call", "code", "saved"),
    [
        (run_directory, "append_metrics", 3, errno.ENOSPC, 5),
        (run_directory, "append_metrics", 3, errno.EROFS, 5),
        (checkpoints.Store, "save", 3, errno.ENOSPC, 2),
        (run_directory, "write_clients", 1, errno.ENOSPC, 6),
    ],
)
def test_a_full_or_read_only_disk_stops_the_run(owner, name, call, code, saved, tmp_path, capsys):
    directory, text = tmp_path / "run", os.strerror(code)
    line = stopped(directory, owner, name, call, lambda: fail(OSError(code, text)))
    assert text in line
    assert f"its checkpoint of round {saved} is intact" in line
    assert ("make it writable" if code == errno.EROFS else "free space on its disk") in line
    assert other_lines(capsys.readouterr().err) == []
    assert_resumes(BASE, directory, saved)


def test_a_file_size_limit_stops_the_run(tmp_path, capfd):
    """Limits files of a checkpoint to a few bytes; orbax writes some of them in C++."""
    directory, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))

    try:
        line = stopped(directory, orbax.checkpoint.CheckpointManager, "save", 3, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written (File too large)" in line
    assert "its checkpoint of round 2 is intact" in line
    assert other_lines(capfd.readouterr().err) == []
    assert {p.name for p in (directory / "checkpoints").iterdir()} == {"1", "2"}
    assert_resumes(BASE, directory, 2)


@pytest.fixture
def messages():
    """Returns a list that receives what is logged by absl, which orbax uses, and by asyncio."""
    handler, records = logging.Handler(), []
    handler.emit = lambda record: records.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


def test_a_failed_save_is_not_reported_twice(tmp_path, messages):
    """Reports other unretrieved exceptions of asyncio and errors of absl."""
    checkpoints.open_store(tmp_path)
    loop = asyncio.new_event_loop()
    for path in ("2.orbax-checkpoint-tmp/state", "thesis.tex"):
        loop.create_future().set_exception(ValueError(f"cannot write {path}: No space left"))
    gc.collect()
    loop.close()
    late = "_SignalingThread.run() raised an exception: No space left"  # after the save raised
    for text in (late, "cannot read a flag"):
        logging.getLogger("absl").error(text)
    asynchronous, other = messages
    assert "thesis.tex" in asynchronous
    assert other == "cannot read a flag"


@pytest.mark.parametrize(
    ("owner", "name"), [(run_directory, "append_metrics"), (checkpoints.Store, "save")]
)
def test_a_moved_directory_is_named(owner, name, tmp_path):
    directory, moved = tmp_path / "run", tmp_path / "moved"
    line = stopped(directory, owner, name, 3, lambda: directory.rename(moved))
    assert f"{directory} was removed or moved during its run" in line
    assert "put it back and repeat the command or call" in line
    shutil.rmtree(directory, ignore_errors=True)
    moved.rename(directory)
    result = runner.run(BASE, directory)
    assert result.resumed_at in (2, 5)
    assert_same_run(result, undisturbed(BASE), directory)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9")],
)
def test_too_little_memory_is_one_line(error, monkeypatch):
    monkeypatch.setattr(runner, "train", lambda *arguments: fail(error))
    with pytest.raises(UsageError, match=r"out of memory .*resume with a smaller chunk"):
        runner.run(BASE)
    monkeypatch.setattr(runner, "train", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.run(BASE)


# Runs never unpickle.

_unpickled = []


def _audit(event, arguments):
    if event == "pickle.find_class":
        _unpickled.append(str(arguments))


def test_a_run_unpickles_nothing(copied):
    sys.addaudithook(_audit)
    shutil.rmtree(copied / "checkpoints" / "6")
    (copied / "report.html").unlink()
    assert runner.run(BASE, copied).resumed_at == 5
    assert _unpickled == []
    for path, content in contents(copied).items():
        assert not content.startswith((b"\x80\x04", b"\x80\x05")), path
