"""Tests of `experiments.export` on a run directory."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedjax_pfl import algorithms
from fedjax_pfl.runs import export, runner
from fedjax_pfl.settings.general import settings_with
from tests.commands import message, run_here
from tests.runs.common import assert_same_bits, contents
from tests.runs.export_test import BASE, scores_of_file, scores_of_run

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

ROOT = Path(__file__).parents[2]
PHASES = {
    **BASE,
    "validation_fraction": 0.2,
    "partition": "listed",
    "listed": {"classes": ((0, 1), (1, 2)), "examples": 20},
    "devices": 2,
    "eval_every": 1,
    "phases": ({"algorithm": "fedavg", "rounds": 1}, {"algorithm": "fedper", "rounds": 3}),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "run"
    return runner.run(PHASES, directory), directory


def test_the_command_writes_models_of_the_run(finished, tmp_path):
    """Exports in another process on one device instead of two; the run is unchanged."""
    (result, directory), out = finished, tmp_path / "out"
    files = contents(directory)
    command = [sys.executable, "-m", "experiments.export", directory, f"--out={out}"]
    run_here("export", directory, f"--out={tmp_path / 'torch'}", "--torch", "--clients=1")
    assert "fc1.weight" in load_file(tmp_path / "torch" / "client-1.safetensors")
    ended = subprocess.run([*command, "--clients=0,2"], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("2 models, ")
    assert contents(directory) == files
    assert {p.name for p in out.iterdir()} == {f"client-{i}.safetensors" for i in (0, 2)}
    paths = export.write_models(result, tmp_path / "written", [0, 2])
    for i, path in zip((0, 2), paths, strict=True):
        assert path.read_bytes() == (out / path.name).read_bytes()
        expected = [result.clients[i][f"before_{name}"] for name in ("accuracy", "loss")]
        np.testing.assert_allclose(scores_of_file(path, result)[0], expected, rtol=1e-5)


def file_states(directory):
    """Returns the inode and modification time of every file and folder."""
    paths = [directory, *sorted(directory.rglob("*"))]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_loading_a_result_only_reads(finished, tmp_path, capsys):
    """Loads a read-only copy that another process has locked."""
    result, original = finished
    directory = tmp_path / "run"
    shutil.copytree(original, directory)
    (directory / "alpha.npz").write_bytes(b"damaged")
    (directory / "checkpoints" / "5.orbax-checkpoint-tmp-1").mkdir()  # as after a kill
    for path in [*directory.rglob("*"), directory]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    states, descriptor = file_states(directory), os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        loaded = export.load_result(directory)
        assert file_states(directory) == states
    finally:
        os.close(descriptor)
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o700)
    line = capsys.readouterr().err
    assert "alpha.npz is damaged (" in line
    assert line.endswith("); it is left out\n")
    resumable = settings_with("resumable")
    assert loaded.config.keys() == result.config.keys()
    for key in result.config.keys() - set(resumable):
        assert loaded.config[key] == result.config[key]
    for field in ("metrics", "clients", "ledger", "observations"):
        assert getattr(loaded, field) == getattr(result, field)
    assert (loaded.directory, loaded.resumed_at) == (directory, 4)
    assert_same_bits((loaded.state, loaded.best), (result.state, result.best))


def test_models_of_the_best_round(finished, tmp_path):
    result, _ = finished
    (path,) = export.write_models(result, tmp_path, [1], best=True)
    assert export.describe(path)["round"] == result.metrics[-1]["best_round"]
    scores, _ = scores_of_file(path, result)
    np.testing.assert_allclose(scores, scores_of_run(result, result.best)[1], rtol=2e-6)
    result, out = result._replace(best=None), tmp_path / "none"
    line = message(lambda: export.write_models(result, out, best=True))
    assert line.startswith("there is no best round: no evaluation of the last phase has finite")
    metrics = [{**metrics, "validation": None} for metrics in result.metrics]
    line = message(lambda: export.write_models(result._replace(metrics=metrics), out, best=True))
    assert line.startswith("there is no best round: the run had no validation examples")


def test_invalid_commands_and_damaged_runs_are_refused(finished, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    out = f"--out={tmp_path / 'out'}"

    def refused(*arguments):
        files = contents(tmp_path)
        line = message(run_here, "export", *arguments)
        assert contents(tmp_path) == files
        return line

    assert refused(out) == "name one run directory, such as runs/pfedla"
    assert refused(directory) == "say where the files go: --out=FOLDER"
    path = tmp_path / "x"
    assert refused(path, out) == f"{path} is not a run directory: it has no config.json"
    assert refused(tmp_path, out).endswith(f"; it contains 1, such as {directory}")
    (tmp_path / "file").write_text("")
    for flags, line in (
        ([out, "--clients=2,3-5"], "there is no client 3; there are 3, from 0 to 2"),
        ([out, "--clients=a"], "is no list of clients such as 0,3-5"),
        ([out, "--clients=4-2"], "4 is above 2"),
        ([out, "--clients=0-999999999"], "names more than 10,000,000 clients; name fewer"),
        ([f"--out={directory}"], "is not empty; choose another folder"),
        ([f"--out={directory / 'config.json'}"], "is not empty"),
        ([f"--out={tmp_path / 'file' / 'below'}"], "cannot be written (Not a dir"),
    ):
        assert line in refused(directory, *flags)

    checkpoint, report = directory / "checkpoints" / "4", directory / "report.html"
    (part,) = (checkpoint / "state").glob("d/*")
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert "the checkpoint of round 4 is damaged: " in refused(directory, out)
    shutil.rmtree(checkpoint)
    assert "has no checkpoint of its last round, 4" in refused(directory, out)
    report.unlink()
    assert "has not finished; run its command again" in refused(directory, out)
    report.write_text("")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dataset": "hospitals"}))
    assert "with a dataset of your own, hospitals; in Python" in refused(directory, out)
    (directory / "config.json").write_text("[")
    assert "is damaged (it is not JSON)" in refused(directory, out)


def plain_method(model, training, federation):
    return algorithms.local(model, training, federation)


def negated_method(model, training, federation):
    local = algorithms.local(model, training, federation)
    return local._replace(predict=lambda variables, x: -local.predict(variables, x))


def test_user_defined_methods_must_predict_with_a_network(tmp_path):
    settings, directory = {**BASE, "rounds": 1}, tmp_path / "run"
    negated = runner.run(settings, algorithm=negated_method)
    line = message(export.write_models, negated, tmp_path / "out")
    assert line.startswith("negated_method predicts with a function of its own, which no file can")
    runner.run(settings, directory, algorithm=plain_method)
    line = message(export.load_result, directory)
    assert "an algorithm of your own, plain_method; in Python" in line
    result = export.load_result(directory, algorithm=plain_method)
    assert len(export.write_models(result, tmp_path / "out")) == 3


def test_a_swept_run_is_exported_like_a_single_run(tmp_path):
    """FedAvg+ trains before it serves, with the learning rate of the run."""
    base = {**BASE, "algorithm": "fedavg_plus", "rounds": 1, "eval_every": 1}
    results = runner.run_all({**base, "sweep": "learning_rate=.5,.001"})
    single = runner.run({**base, "learning_rate": 0.001})
    models = []
    for name, result in (("swept", results["learning_rate=0.001,seed=0"]), ("single", single)):
        models.append([load_file(path) for path in export.write_models(result, tmp_path / name)])
    chex.assert_trees_all_close(*models, rtol=1e-6, atol=1e-7)


def test_files_without_a_model_are_refused(finished, tmp_path):
    path = tmp_path / "x.safetensors"
    assert "cannot be read" in message(export.load, path)
    path.write_bytes(b"\x80\x04nothing")
    assert "cannot be read" in message(export.load, path)
    save_file({"a": np.zeros(2)}, path)
    assert "holds no model of this library" in message(export.load, path)

    (valid,) = export.write_models(finished[0], tmp_path / "out", [0])
    arrays = load_file(valid)
    short = {**arrays, "params/fc1/kernel": arrays["params/fc1/kernel"][:-1]}
    incomplete = {k: v for k, v in arrays.items() if "fc2" not in k}
    for content, changes, line in (
        (short, {}, "its network and its arrays do not fit"),
        (incomplete, {}, "its network and its arrays do not fit"),
        (arrays, {"model": {"kind": "os.system"}}, "do not fit"),
        (arrays, {"format": 2}, "holds no model of this library"),
    ):
        facts = json.dumps({**export.describe(valid), **changes})
        save_file(content, path, metadata={"fedjax_pfl": facts})
        assert line in message(export.load, path)


def test_a_missing_package_is_named(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    line = message(export.write_models, finished[0], tmp_path)
    assert line == "safetensors is missing: run pip install '.[export]' in the clone"
