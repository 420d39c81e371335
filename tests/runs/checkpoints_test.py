"""When checkpoints are written, and which of them a run goes on from."""

import shutil
import time

import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, resume, run_directory, run_state, runner
from tests.runs.common import BASE, assert_same_bits, assert_same_run, contents, undisturbed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


class Stop(BaseException):
    """Stands for Ctrl-C, which pytest would take for its own."""


def test_by_default_checkpoints_take_a_twentieth_of_the_time(tmp_path, monkeypatch):
    """These take longer than rounds: one is written at the first evaluation and one at the last."""
    config = {**BASE, "checkpoint_every": None, "eval_every": 1}
    save, saved = checkpoints.Store.save, []

    def slow(self, step, trees, facts):
        saved.append(step)
        save(self, step, trees, facts)
        time.sleep(1.0)

    append = run_directory.append_metrics

    def stop(directory, line):
        if line["round"] == 4:
            raise Stop
        append(directory, line)

    monkeypatch.setattr(checkpoints.Store, "save", slow)
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "append_metrics", stop)
        with pytest.raises(Stop):
            runner.run(config, tmp_path)
    assert saved == [1]
    result = runner.run(config, tmp_path)
    assert (saved, result.resumed_at) == ([1, 2, 6], 1)  # what one takes here is not yet known
    assert_same_run(result, undisturbed(config), tmp_path)
    took = [line["checkpoint_seconds"] for line in result.metrics]
    assert took[:2] == [0, 0]
    assert all(seconds > 1 for seconds in took[2:])
    assert [line["checkpoint_seconds"] for line in undisturbed(config).metrics] == [0] * 6


def test_the_next_checkpoint_has_to_fit_into_the_twentieth_too():
    """Of the time of all runs that a program computes: here two, of ten seconds each."""
    at = run_state.Position(seconds=10.0, checkpoint_seconds=0.25)
    member = run_state.SweepRun("", {}, {}, at=at, last_checkpoint_seconds=0.25)
    assert resume.can_save_checkpoint([member, member])
    slower = run_state.SweepRun("", {}, {}, at=at, last_checkpoint_seconds=0.26)
    assert not resume.can_save_checkpoint([slower, member])
    member.at = at._replace(seconds=9.9)
    assert not resume.can_save_checkpoint([member])


def test_a_checkpoint_of_a_run_with_other_settings_is_refused(finished, tmp_path):
    directory, there = tmp_path / "run", {**BASE, "seed": 1, "chunk": 2}
    runner.run(there, directory)
    shutil.rmtree(directory / "checkpoints")
    (directory / "report.html").unlink()
    shutil.copytree(finished[1] / "checkpoints", directory / "checkpoints")
    before = contents(directory)
    with pytest.raises(UsageError) as caught:
        runner.run(there, directory)
    assert str(caught.value) == (
        f"{directory / 'checkpoints'} holds a checkpoint of a run with other settings: seed "
        "(0 there, 1 here); restore this run's checkpoints from a copy, or delete that folder to "
        "start again"
    )
    assert contents(directory) == before
    shutil.rmtree(directory / "checkpoints")
    assert_same_run(runner.run(there, directory), undisturbed(there), directory)


def test_the_smallest_change_of_any_file_is_noticed(tmp_path):
    """A bit flipped, or a byte gone, in each file of a checkpoint in turn."""
    store = checkpoints.open_store(tmp_path / "saved")
    trees = {"state": {"w": np.arange(6, dtype=np.float32), "n": np.int32(3)}}
    store.save(1, trees, {"round": 1})
    store.check(1)
    found = sorted(p for p in (tmp_path / "saved" / "1").rglob("*") if p.is_file())
    assert len(found) > 5
    for path in found:
        whole = path.read_bytes()
        last = bytes([whole[-1] ^ 1])
        for damaged in (whole[:-1] + last, whole[:-1], b""):
            path.write_bytes(damaged)
            with pytest.raises(checkpoints.DamagedError, match="is not what was written") as caught:
                store.check(1)
            assert path.name == checkpoints.SUMS or path.name in str(caught.value)
        path.write_bytes(whole)
    store.check(1)
    (tmp_path / "saved" / "1" / checkpoints.SUMS).unlink()  # what a kill just before it leaves
    store.check(1)


def test_a_description_that_nests_without_end_spoils_its_own_checkpoint_only(tmp_path):
    """Orbax reads those of all of them as it opens the folder."""
    kept = {"w": np.arange(6, dtype=np.float32)}
    for step in (1, 2):
        checkpoints.open_store(tmp_path).save(step, {"state": kept}, {})
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=f"is damaged, which hides the others; remove {tmp_path}"):
        checkpoints.open_store(tmp_path, read_only=True)
    store = checkpoints.open_store(tmp_path)
    assert store.steps() == [2, 1]
    with pytest.raises(checkpoints.DamagedError, match="_CHECKPOINT_METADATA"):
        store.check(2)
    store.check(1)
    assert_same_bits(store.restore(1, {"state": kept})["state"], kept)


def test_other_dtypes_and_shapes_are_refused_by_name(tmp_path):
    store = checkpoints.open_store(tmp_path)
    kept = {"w": np.arange(6, dtype=np.float32), "empty": np.zeros((0, 2), np.float32)}
    store.save(1, {"state": kept}, {})
    assert_same_bits(store.restore(1, {"state": kept})["state"], kept)
    for other, words in (
        (np.zeros(6, np.float64), "float32[6] there and float64[6] in this run"),
        (np.zeros(6, np.float16), "float32[6] there and float16[6] in this run"),
        (np.zeros(6, np.int32), "float32[6] there and int32[6] in this run"),
        (np.zeros((2, 3), np.float32), "float32[6] there and float32[2, 3] in this run"),
    ):
        with pytest.raises(checkpoints.DamagedError) as caught:
            store.restore(1, {"state": {**kept, "w": other}})
        assert str(caught.value) == f"state['w'] is {words}"
    with pytest.raises(checkpoints.DamagedError, match="other parts"):
        store.restore(1, {"state": {"w": kept["w"]}})
