"""Runs and their directories: what is written, what a resumption goes on from, what is refused.

Compiled rounds are kept between the tests of this file, so that each configuration compiles once;
the killed process at the end starts from nothing.
"""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import build, checkpoints, report, rundir, runner, trees
from fedjax_pfl.data import client_data
from fedjax_pfl.errors import UsageError

BASE = {
    "dataset": "synthetic",
    "synthetic": {"shape": (2, 2, 1), "classes": 3, "examples": 60, "test_examples": 0},
    "partition": "iid",
    "validation_fraction": 0.2,
    "model": "mlp",
    "mlp": {"hidden": (4,)},
    "clients": 3,
    "clients_per_round": 2,
    "rounds": 6,
    "eval_every": 2,
    "checkpoint_every": 1,
    "local_epochs": 1,
    "batch_size": 8,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "keep_momentum": True,
    "dropout": 0.4,
    "devices": 2,
}
PHASES = {**BASE, "eval_every": 1, "phases": ({"rounds": 2}, {"algorithm": "local", "rounds": 2})}
FILES = {
    "config.json",
    "metrics.jsonl",
    "clients.csv",
    "traffic.json",
    "checkpoints",
    "figures",
    "report.html",
}
MODEL = 4 * (4 * 4 + 4 + 4 * 3 + 3)  # bytes of the network
_undisturbed = {}


@pytest.fixture(scope="module", autouse=True)
def real_report():
    """Compile each configuration once, and let an empty page stand for the report."""
    made, built, written = runner.build, {}, report.write

    def once(settings):
        key = settings.to_json()
        if key not in built:
            built[key] = made(settings)
        return built[key]

    def page(directory, extra_figures):
        (directory / "figures").mkdir(exist_ok=True)
        (directory / "report.html").write_text("a page")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "build", once)
        patch.setattr(report, "write", page)
        yield written


def undisturbed(config):
    """A run that nothing happened to."""
    key = json.dumps(config, sort_keys=True)
    if key not in _undisturbed:
        _undisturbed[key] = runner.run(config)
    return _undisturbed[key]


def untimed(metrics):
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in metrics]


def read_metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def contents(directory):
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def assert_same_run(got, wanted, directory=None):
    assert_same_bits(got.state, wanted.state)
    assert_same_bits(got.best, wanted.best)
    assert got.ledger == wanted.ledger
    assert got.clients == wanted.clients
    assert untimed(got.metrics) == untimed(wanted.metrics)
    if directory:
        assert untimed(read_metrics(directory)) == untimed(wanted.metrics)
        assert {p.name for p in directory.iterdir()} == FILES


def after_rounds(made, number):
    """The state after a number of rounds, one call each."""
    rounds = made.phases[0].rounds
    key, data = rounds.place((jax.random.key(0), made.data))
    state, one = rounds.init(key), rounds.place(jnp.int32(1))
    for t in range(number):
        state, _ = rounds.run(key, state, data, rounds.place(jnp.int32(t)), one)
    return state


# What a run leaves behind.


@pytest.fixture(scope="module")
def finished(tmp_path_factory, real_report):
    """One run with its real report. Nothing may be written to its directory."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", real_report)
        return runner.run(BASE, directory), directory


def test_the_directory_holds_the_files_of_the_design(finished):
    _, directory = finished
    assert {p.name for p in directory.iterdir()} == FILES
    figures = {p.name for p in (directory / "figures").iterdir()}
    assert "partition.png" in figures
    assert all(name.endswith(".png") for name in figures)
    assert "<html" in (directory / "report.html").read_text()
    assert len(list((directory / "checkpoints").iterdir())) == 2


def test_the_files_agree_with_each_other_and_the_result(finished):
    result, directory = finished
    config = json.loads((directory / "config.json").read_text())
    assert config == result.config
    assert (config["clients"], config["mlp"]) == (3, {"hidden": [4]})

    lines = read_metrics(directory)
    assert lines == result.metrics
    assert [line["round"] for line in lines] == [2, 4, 6]
    wanted = {
        "round", "phase", "seconds", "compile_seconds", "train_loss", "before", "after",
        "validation", "bytes_down", "bytes_up", "dropped", "rejected", "best_round",
    }  # fmt: skip
    for line in lines:
        assert set(line) == wanted
        for stage in ("before", "after", "validation"):
            assert set(line[stage]) == {
                "accuracy_mean", "accuracy_weighted", "accuracy_std", "accuracy_worst10", "loss"
            }  # fmt: skip

    last, traffic = lines[-1], json.loads((directory / "traffic.json").read_text())
    assert (traffic["total_down"], traffic["total_up"]) == (last["bytes_down"], last["bytes_up"])
    assert sum(traffic["down"].values()) == traffic["total_down"] == 2 * 6 * MODEL
    answers = 2 * 6 - last["dropped"]
    assert sum(traffic["up"].values()) == traffic["total_up"] == answers * MODEL

    with (directory / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == ["0", "1", "2"]
    assert [list(row) for row in rows] == [list(row) for row in result.clients]
    numbers = lambda key: [float(row[key]) for row in rows]
    assert sum(numbers("bytes_down")) == last["bytes_down"]
    assert sum(numbers("bytes_up")) == last["bytes_up"]
    assert sum(numbers("dropped")) == last["dropped"] > 0
    assert sum(numbers("rejected")) == last["rejected"] == 0
    assert sum(numbers("visits")) == answers
    assert np.mean(numbers("before_accuracy")) == pytest.approx(last["before"]["accuracy_mean"])
    assert np.mean(numbers("after_loss")) == pytest.approx(last["after"]["loss"])
    assert [int(n) for n in numbers("train_examples")] == result.federation.counts.tolist()


def test_a_finished_run_says_so_and_is_left_as_it_is(finished):
    result, directory = finished
    before = contents(directory)
    again = runner.run(BASE, directory)
    assert again.resumed_at == again.metrics[-1]["round"] == 6
    assert contents(directory) == before
    assert_same_run(again, result)
    assert again.metrics == result.metrics  # not even the times change


def test_the_same_configuration_twice_gives_the_same(finished, tmp_path):
    result, _ = finished
    assert result.resumed_at is None
    assert_same_run(runner.run(BASE, tmp_path / "again"), result, tmp_path / "again")


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.run(BASE)
    assert list(tmp_path.iterdir()) == []
    assert result.directory is None
    assert result.resumed_at is None
    assert len(result.metrics) == 3


def test_best_is_the_state_of_the_best_round(finished):
    result, _ = finished
    scores = {line["round"]: line["validation"]["accuracy_mean"] for line in result.metrics}
    best = result.metrics[-1]["best_round"]
    assert best == max(scores, key=lambda t: (scores[t], -t))  # the first of the best
    seen = [line["best_round"] for line in result.metrics]
    assert seen == [max((t for t in scores if t <= now), key=lambda t: (scores[t], -t))
                    for now in scores]  # fmt: skip
    assert_same_bits(jax.device_get(after_rounds(result, best)), result.best)


# Interrupted and resumed.


class Stop(BaseException):
    """Stands for Ctrl-C, which pytest would take for its own."""


@pytest.mark.parametrize("at", [1, 3])
def test_a_run_that_is_stopped_at_an_evaluation_goes_on(at, tmp_path, monkeypatch):
    """The line of the evaluation is written or not; its checkpoint is not there."""
    append, calls = rundir.append_metrics, []

    def stop(directory, line):
        calls.append(line)
        if len(calls) == at:
            if at == 3:
                append(directory, line)
            raise Stop
        append(directory, line)

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "append_metrics", stop)
        with pytest.raises(Stop):
            runner.run(BASE, tmp_path)
    result = runner.run(BASE, tmp_path)
    assert result.resumed_at == 2 * at - 1
    assert_same_run(result, undisturbed(BASE), tmp_path)


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_is_stopped_at_a_checkpoint_goes_on(after, tmp_path, monkeypatch):
    save = checkpoints.Store.save

    def stop(self, step, trees, facts):
        if step < 3 or after:
            save(self, step, trees, facts)
        if step == 3:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", stop)
        with pytest.raises(Stop):
            runner.run(BASE, tmp_path)
    result = runner.run(BASE, tmp_path)
    assert result.resumed_at == (3 if after else 2)
    assert_same_run(result, undisturbed(BASE), tmp_path)


def test_a_run_that_is_stopped_before_its_report_gets_one(tmp_path, monkeypatch):
    def stop(directory, ledger):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "write_traffic", stop)
        with pytest.raises(Stop):
            runner.run(BASE, tmp_path)
    result = runner.run(BASE, tmp_path)
    assert result.resumed_at == 6
    assert_same_run(result, undisturbed(BASE), tmp_path)


_watch = {"path": None, "seen": None}


def _audit(event, args):
    path = _watch["path"]
    if path and event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"):
        if str(path) not in str(args[0]) or (event == "open" and args[1] in ("r", "rb")):
            return
        _watch["path"] = None  # copying is not to be watched
        _watch["seen"]()
        _watch["path"] = path


def test_whatever_a_kill_leaves_of_a_checkpoint_the_run_goes_on(tmp_path, monkeypatch):
    """The directory as it is before each step that saving (and deleting the oldest) takes."""
    directory, copies = tmp_path / "run", []

    def copy():
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(directory, copies[-1])

    save = checkpoints.Store.save

    def watched(self, step, trees, facts):
        if step == 4:
            _watch.update(path=directory, seen=copy)
        save(self, step, trees, facts)
        _watch["path"] = None

    sys.addaudithook(_audit)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", watched)
        runner.run(BASE, directory)
    assert len(copies) > 10
    found = set()
    for copied in copies[:: len(copies) // 6]:
        result = runner.run(BASE, copied)
        found.add(result.resumed_at)
        assert_same_run(result, undisturbed(BASE), copied)
    assert found <= {3, 4}
    assert 3 in found


@pytest.mark.parametrize("at", [1, 2, 3])
def test_phases_run_one_after_the_other_and_resume_in_each(at, tmp_path, monkeypatch):
    wanted = undisturbed(PHASES)
    assert [line["phase"] for line in wanted.metrics] == [0, 0, 1, 1]
    assert [line["round"] for line in wanted.metrics] == [1, 2, 3, 4]
    down = [line["bytes_down"] for line in wanted.metrics]
    assert down == [2 * MODEL, 4 * MODEL, 4 * MODEL, 4 * MODEL]  # local moves nothing
    assert sum(wanted.ledger.visits) + sum(wanted.ledger.dropped) == 8  # one ledger for both
    assert wanted.metrics[2]["best_round"] == 3  # the best of this phase
    assert wanted.state.server == ()

    save = checkpoints.Store.save

    def stop(self, step, trees, facts):
        save(self, step, trees, facts)
        if step == at:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Store, "save", stop)
        with pytest.raises(Stop):
            runner.run(PHASES, tmp_path)
    result = runner.run(PHASES, tmp_path)
    assert result.resumed_at == at
    assert_same_run(result, wanted, tmp_path)


# Damaged checkpoints.


def _flip(path):
    content = bytearray(path.read_bytes())
    for i in range(len(content) // 3, len(content), max(1, len(content) // 5)):
        content[i] ^= 0x55
    path.write_bytes(bytes(content))


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _fake_number(path):
    """Still JSON, and nothing but a number is another one."""
    text = path.read_text()
    assert '"round": 6' in text or '"round":6' in text
    path.write_text(text.replace('"round": 6', '"round": 5').replace('"round":6', '"round":5'))


def _data_files(step):
    return [p for p in (step / "state").rglob("d/*") if p.is_file()]


def _mix_up(step):
    """Whole and readable, but the state of another round."""
    shutil.rmtree(step / "state")
    shutil.copytree(step.with_name("5") / "state", step / "state")


DAMAGES = {
    "state of round 5": _mix_up,
    "state flipped": lambda step: [_flip(p) for p in _data_files(step)],
    "state truncated": lambda step: [_truncate(p) for p in _data_files(step)],
    "best gone": lambda step: shutil.rmtree(step / "best"),
    "manifest flipped": lambda step: _flip(step / "state" / "manifest.ocdbt"),
    "facts flipped": lambda step: _flip(step / "meta" / "metadata"),
    "facts truncated": lambda step: _truncate(step / "meta" / "metadata"),
    "facts changed": lambda step: _fake_number(step / "meta" / "metadata"),
    "facts gone": lambda step: shutil.rmtree(step / "meta"),
    "all empty": lambda step: [p.write_bytes(b"") for p in step.rglob("*") if p.is_file()],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's readers
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage, finished, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    DAMAGES[damage](directory / "checkpoints" / "6")
    result = runner.run(BASE, directory)
    assert result.resumed_at == 5
    line = capsys.readouterr().err.strip()
    assert line.startswith("The checkpoint of round 6 is damaged: ")
    assert "\n" not in line
    assert_same_run(result, finished[0], directory)
    again = runner.run(BASE, directory)  # the damaged one has been saved anew
    assert again.resumed_at == 6
    assert capsys.readouterr().err == ""
    assert_same_run(again, finished[0], directory)


def test_where_all_checkpoints_are_damaged_the_run_starts_again(finished, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    for step in (directory / "checkpoints").iterdir():
        DAMAGES["facts truncated"](step)
    result = runner.run(BASE, directory)
    assert result.resumed_at is None
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert_same_run(result, finished[0], directory)


# Directories that are refused.


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
    assert rundir.claim(tmp_path, {"seed": 0}) == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_configuration_that_cannot_be_leaves_no_directory(tmp_path):
    assert "batch_size" in refused({**BASE, "batch_size": 0}, tmp_path / "new")
    wrong = {**BASE, "phases": ({"algorithm": "local"}, {"algorithm": "fedavg"})}
    assert "global model" in refused(wrong, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


# Settings that the runner itself acts on.


def test_neither_after_nor_the_first_download_and_every_update_rejected(capsys):
    """And nothing to validate on: no best."""
    changes = {
        "max_update_norm": 1e-6,
        "evaluate_after": False,
        "count_initial_download": False,
        "validation_fraction": 0.0,
        "clients_per_round": None,
        "eval_every": 1,
        "rounds": 2,
        "dropout": 0.0,
    }
    result = runner.run({**BASE, **changes})
    assert [line["after"] for line in result.metrics] == [None, None]
    assert [line["validation"] for line in result.metrics] == [None, None]
    assert [line["best_round"] for line in result.metrics] == [None, None]
    assert result.best is None
    assert [line["bytes_down"] for line in result.metrics] == [0, 3 * MODEL]
    assert [line["bytes_up"] for line in result.metrics] == [3 * MODEL, 6 * MODEL]
    assert result.ledger.client_down == [MODEL] * 3
    assert all(row["after_accuracy"] is None for row in result.clients)

    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 6
    assert lines[5] == (
        "round 2: the update of client 2 was rejected, it is not finite or too large"
    )
    assert [line["rejected"] for line in result.metrics] == [3, 6]
    assert result.ledger.rejected == [2, 2, 2]
    assert [line["train_loss"] for line in result.metrics] == [None, None]
    first = result.phases[0].rounds.init(jax.random.key(0))
    assert_same_bits(jax.device_get(result.state), jax.device_get(first))


def test_groups_of_two_widths_with_smaller_uploads(tmp_path):
    changes = {
        "groups": ({}, {"mlp": {"hidden": (2,)}}),
        "upload_bits": 8,
        "clients_per_round": None,
        "rounds": 2,
        "dropout": 0.0,
    }
    result = runner.run({**BASE, **changes}, tmp_path)
    wide, narrow = (16, 4, 12, 3), (8, 2, 6, 3)  # values of each array
    down = [4 * sum(sizes) for sizes in (wide, narrow)]
    up = [sum(size + 4 for size in sizes) for sizes in (wide, narrow)]  # a byte each and a scale
    assert [row["group"] for row in result.clients] == [0, 1, 0]
    assert result.ledger.client_down == [2 * down[0], 2 * down[1], 2 * down[0]]
    assert result.ledger.client_up == [2 * up[0], 2 * up[1], 2 * up[0]]
    shapes = [s["params"]["fc1"]["kernel"].shape for s in result.state.server]
    assert shapes == [(4, 4), (4, 2)]
    again = runner.run({**BASE, **changes}, tmp_path)
    assert again.resumed_at == 2
    assert_same_run(again, result, tmp_path)


def _built_for(changes):
    return build.build(runner.configuration.complete({**BASE, **changes}))


def test_chunks_of_clients_and_devices_do_not_matter(finished):
    """One client at a time on each of two devices; and the cohort at once on one."""
    together = after_rounds(_built_for({"chunk": 4, "devices": 1}), 1)
    apart = after_rounds(finished[0], 1)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_drops_at_its_rounds():
    """After half and three quarters of a phase, counted from its first round: one step's size."""
    changes = {
        "local_epochs": None,
        "local_steps": 1,
        "keep_momentum": False,
        "phases": ({"rounds": 2}, {"rounds": 4, "learning_rate_drops": (0.5, 0.75)}),
    }
    phase, data = (made := _built_for(changes)).phases[1], made.data
    key = jax.random.key(0)
    server = phase.rounds.init(key).server
    client = jax.tree.map(jnp.asarray, client_data(data, 0))

    @jax.jit
    def step(t):
        upload, *_ = phase.algorithm.train(server, (), client, t, key)
        return trees.squared_norm(trees.change(server, upload))

    sizes = np.sqrt([float(step(jnp.int32(t))) for t in range(2, 7)])
    np.testing.assert_allclose(sizes / sizes[0], [1, 1, 0.1, 0.01, 0.01], rtol=1e-3)


# A real process, really killed.


def _start(directory):
    """`experiments.baseline` with BASE, compiled as in this process."""
    flags = [f"--workdir={directory}"]
    for key, value in BASE.items():
        inner = value.items() if isinstance(value, dict) else ()
        flags += [f"--config.{key}.{name}={v}" for name, v in inner]
        flags += [] if inner else [f"--config.{key}={value}"]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.baseline", *flags],
        env=environment,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_process_goes_on_and_ends_as_if_nothing_had_happened(finished, tmp_path):
    directory, lines = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    processes = [_start(directory)]
    guard = threading.Timer(150, lambda: [p.kill() for p in processes])
    guard.start()
    try:
        while processes[0].poll() is None:
            if lines.exists() and lines.read_text().count("\n") >= 2:
                processes[0].send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        assert processes[0].wait() == -signal.SIGKILL, processes[0].communicate()
        assert not (directory / "report.html").exists()
        processes.append(_start(directory))
        out, err = processes[1].communicate()
    finally:
        guard.cancel()
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1].returncode == 0, err
    assert "This run resumed at round" in out
    wanted, there = finished
    assert {p.name for p in directory.iterdir()} == FILES
    for name in ("config.json", "clients.csv", "traffic.json"):
        assert (directory / name).read_bytes() == (there / name).read_bytes()
    result = runner.run(BASE, directory)
    assert result.resumed_at == 6
    assert_same_run(result, wanted, directory)
