"""Tests of when checkpoints are saved, and of damaged or unsuitable ones."""

import shutil
import time

import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, resume, run_directory, run_state, runner
from tests.runs.common import (
    BASE,
    assert_resumes,
    assert_same_bits,
    assert_same_run,
    kill,
    refusal,
    undisturbed,
)

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


def test_default_checkpoints_take_a_twentieth_of_the_time(tmp_path, monkeypatch):
    """Saves at the first and last evaluation, as saving takes longer than the rounds."""
    config = {**BASE, "checkpoint_every": None, "eval_every": 1}
    save, steps = checkpoints.Store.save, []

    def slow(self, step, trees, facts):
        steps.append(step)
        save(self, step, trees, facts)
        time.sleep(1.0)

    monkeypatch.setattr(checkpoints.Store, "save", slow)
    with kill(run_directory, "append_metrics", lambda _, line: line["round"] == 4):
        runner.run(config, tmp_path)
    assert steps == [1]
    result = runner.run(config, tmp_path)
    assert (steps, result.resumed_at) == ([1, 2, 6], 1)  # the time of saving is not yet measured
    assert_same_run(result, undisturbed(config), tmp_path)
    seconds = [line["checkpoint_seconds"] for line in result.metrics]
    assert seconds[:2] == [0, 0]
    assert all(value > 1 for value in seconds[2:])
    assert [line["checkpoint_seconds"] for line in undisturbed(config).metrics] == [0] * 6


def test_the_next_checkpoint_must_fit_into_the_twentieth():
    """Counts the time of both runs of a program, ten seconds each."""
    at = run_state.Position(seconds=10.0, checkpoint_seconds=0.25)
    run = run_state.SweepRun("", {}, {}, at=at, last_checkpoint_seconds=0.25)
    assert resume.can_save_checkpoint([run, run])
    slower = run_state.SweepRun("", {}, {}, at=at, last_checkpoint_seconds=0.26)
    assert not resume.can_save_checkpoint([slower, run])
    run.at = at._replace(seconds=9.9)
    assert not resume.can_save_checkpoint([run])


def test_a_checkpoint_of_a_run_with_other_settings_is_refused(finished, tmp_path):
    directory, settings = tmp_path / "run", {**BASE, "seed": 1, "chunk": 2}
    runner.run(settings, directory)
    shutil.rmtree(directory / "checkpoints")
    (directory / "report.html").unlink()
    shutil.copytree(finished[1] / "checkpoints", directory / "checkpoints")
    assert refusal(settings, directory) == (
        f"{directory / 'checkpoints'} holds a checkpoint of a run with other settings: seed "
        "(0 there, 1 here); restore this run's checkpoints from a copy, or delete that folder to "
        "start again"
    )
    shutil.rmtree(directory / "checkpoints")
    assert_resumes(settings, directory, None)


def test_a_changed_bit_or_byte_of_any_file_is_damage(tmp_path):
    store = checkpoints.open_store(tmp_path / "saved")
    trees = {"state": {"w": np.arange(6, dtype=np.float32), "n": np.int32(3)}}
    store.save(1, trees, {"round": 1})
    store.check(1)
    files = sorted(p for p in (tmp_path / "saved" / "1").rglob("*") if p.is_file())
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        flipped = bytes([content[-1] ^ 1])
        for damaged in (content[:-1] + flipped, content[:-1], b""):
            path.write_bytes(damaged)
            with pytest.raises(checkpoints.DamagedError, match="is not what was written") as caught:
                store.check(1)
            assert path.name == checkpoints.SUMS or path.name in str(caught.value)
        path.write_bytes(content)
    (tmp_path / "saved" / "1" / ".DS_Store").touch()  # by a file manager
    store.check(1)
    assert_same_bits(store.restore(1, trees)["state"], trees["state"])
    (tmp_path / "saved" / "1" / checkpoints.SUMS).unlink()  # a kill before the last file
    store.check(1)


def test_deeply_nested_json_damages_its_own_checkpoint_only(tmp_path):
    """Orbax reads the metadata of all checkpoints when it opens the folder."""
    tree = {"w": np.arange(6, dtype=np.float32)}
    for step in (1, 2):
        checkpoints.open_store(tmp_path).save(step, {"state": tree}, {})
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=f"is damaged, which hides the others; remove {tmp_path}"):
        checkpoints.open_store(tmp_path, read_only=True)
    store = checkpoints.open_store(tmp_path)
    assert store.steps() == [2, 1]
    with pytest.raises(checkpoints.DamagedError, match="_CHECKPOINT_METADATA"):
        store.check(2)
    store.check(1)
    assert_same_bits(store.restore(1, {"state": tree})["state"], tree)


def test_a_mismatched_leaf_is_named(tmp_path):
    store = checkpoints.open_store(tmp_path)
    tree = {"w": np.arange(6, dtype=np.float32), "empty": np.zeros((0, 2), np.float32)}
    store.save(1, {"state": tree}, {})
    assert_same_bits(store.restore(1, {"state": tree})["state"], tree)
    for leaf, text in (
        (np.zeros(6, np.float64), "float64[6]"),
        (np.zeros(6, np.int32), "int32[6]"),
        (np.zeros((2, 3), np.float32), "float32[2, 3]"),
    ):
        with pytest.raises(checkpoints.DamagedError) as error:
            store.restore(1, {"state": {**tree, "w": leaf}})
        assert str(error.value) == f"state['w'] is float32[6] there and {text} in this run"
    with pytest.raises(checkpoints.DamagedError, match="other parts"):
        store.restore(1, {"state": {"w": tree["w"]}})


def test_facts_of_another_version_are_damage():
    facts = resume.to_facts(run_state.Position())
    assert resume._position(facts) == run_state.Position()
    for other in (facts | {"new": 1}, {k: v for k, v in facts.items() if k != "ledger"}):
        with pytest.raises(checkpoints.DamagedError, match="that this version"):
            resume._position(other)
