"""`experiments.export` on a run directory."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedjax_pfl import algorithms
from fedjax_pfl.runs import export, runner
from fedjax_pfl.settings.general import settings_with
from tests.commands import message, run_here
from tests.runs.common import assert_same_bits
from tests.runs.export_test import BASE, by_file, in_the_run

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


def contents(directory):
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def export_to(directory, out, *arguments):
    command = [sys.executable, "-m", "experiments.export", str(directory), f"--out={out}"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT)


def test_the_command_restores_and_writes(finished, tmp_path):
    """In a new process, on one device in place of two; the run stays as it is."""
    result, directory = finished
    before = contents(directory)
    done = export_to(directory, tmp_path / "out", "--clients=0,2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 models, ")
    assert contents(directory) == before
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        f"client-{i}.safetensors" for i in (0, 2)
    }
    here = export.write_models(result, tmp_path / "here", [0, 2])
    for i, path in zip((0, 2), here, strict=True):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
        # They score what the run says that these clients score.
        own = result.clients[i]
        np.testing.assert_allclose(
            by_file(path, result)[0], [own["before_accuracy"], own["before_loss"]], rtol=1e-5
        )


def untouched(directory):
    """Each file's and folder's place on the disk, and when it was written."""
    every = [directory, *sorted(directory.rglob("*"))]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in every}


def test_a_run_is_restored_by_reading_alone(finished, tmp_path, capsys):
    """Of a copy that nobody may write to, and that another process holds; as the run left it."""
    result, original = finished
    directory = tmp_path / "run"
    shutil.copytree(original, directory)
    (directory / "alpha.npz").write_bytes(b"damaged")
    (directory / "checkpoints" / "5.orbax-checkpoint-tmp-1").mkdir()  # what a kill has left
    for path in [*directory.rglob("*"), directory]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    before, held = untouched(directory), os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        again = export.load_result(directory)
        assert untouched(directory) == before
    finally:
        os.close(held)
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o700)
    line = capsys.readouterr().err
    assert "alpha.npz is damaged (" in line
    assert line.endswith("); it is left out\n")
    neutral = {*settings_with("resumable")}

    def kept(config):
        return {key: value for key, value in config.items() if key not in neutral}

    assert kept(again.config) == kept(result.config)
    assert (again.metrics, again.clients, again.ledger, again.observations) == (
        result.metrics,
        result.clients,
        result.ledger,
        result.observations,
    )
    assert (again.directory, again.resumed_at) == (directory, 4)
    assert_same_bits(again.state, result.state)
    assert_same_bits(again.best, result.best)


def test_the_best_round(finished, tmp_path):
    result, _ = finished
    best = result.metrics[-1]["best_round"]
    (path,) = export.write_models(result, tmp_path, [1], best=True)
    assert export.describe(path)["round"] == best
    scores, _ = by_file(path, result)
    np.testing.assert_allclose(scores, in_the_run(result, result.best)[1], rtol=2e-6)


def refused(tmp_path, *arguments):
    """The command's line, in this process; nothing is written."""
    before = contents(tmp_path)
    line = message(run_here, "export", *arguments)
    assert contents(tmp_path) == before
    return line


def test_bad_input_is_one_line(finished, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished[1], directory)
    out = f"--out={tmp_path / 'out'}"
    no = partial(refused, tmp_path)
    assert no(out) == "name one run directory, such as runs/pfedla"
    assert no(directory) == "say where the files go: --out=FOLDER"
    assert no(tmp_path / "x", out) == (
        f"{tmp_path / 'x'} is not a run directory: it has no config.json"
    )
    assert no(tmp_path, out).endswith(f"; it contains 1, such as {directory}")
    assert no(directory, out, "--clients=2,3-5") == "there is no client 3; there are 3, from 0 to 2"
    assert "is no list of clients such as 0,3-5" in no(directory, out, "--clients=a")
    assert "4 is above 2" in no(directory, out, "--clients=4-2")
    assert "is not empty; choose another folder" in no(directory, f"--out={directory}")
    assert "is not empty" in no(directory, f"--out={directory / 'config.json'}")
    (tmp_path / "closed").write_text("")
    assert "cannot be written (Not a dir" in no(directory, f"--out={tmp_path / 'closed' / 'b'}")

    # Damage, an end that is missing, and what is not there.
    (part,) = (directory / "checkpoints" / "4" / "state").glob("d/*") or [None]
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert "the checkpoint of round 4 is damaged: " in no(directory, out)
    shutil.rmtree(directory / "checkpoints" / "4")
    assert "has no checkpoint of its last round, 4" in no(directory, out)
    (directory / "report.html").unlink()
    assert "has not finished; run its command again" in no(directory, out)
    known = json.loads((directory / "config.json").read_text())
    (directory / "report.html").write_text("")
    (directory / "config.json").write_text(json.dumps(known | {"dataset": "hospitals"}))
    assert "with a dataset of your own, hospitals; in Python" in no(directory, out)
    (directory / "config.json").write_text("[")
    assert "is damaged (it is not JSON)" in no(directory, out)


def test_no_best_round_without_validation_examples(finished, tmp_path):
    line = message(
        lambda: export.write_models(finished[0]._replace(best=None), tmp_path, best=True)
    )
    assert line.startswith("there is no best round: the run had no validation examples")


def plain(model, training, federation):
    return algorithms.local(model, training, federation)


def strange(model, training, federation):
    usual = plain(model, training, federation)
    return usual._replace(predict=lambda variables, x: -usual.predict(variables, x))


def test_methods_of_ones_own(tmp_path):
    """One that predicts with a network can be written, from a directory too; another not."""
    directory = tmp_path / "run"
    odd = runner.run({**BASE, "rounds": 1}, algorithm=strange)
    line = message(lambda: export.write_models(odd, tmp_path / "out"))
    assert line.startswith("strange predicts with a function of its own, which no file can hold")
    runner.run({**BASE, "rounds": 1}, directory, algorithm=plain)
    line = message(lambda: export.load_result(directory))
    assert "an algorithm of your own, plain; in Python" in line
    again = export.load_result(directory, algorithm=plain)
    assert len(export.write_models(again, tmp_path / "out")) == 3


def test_a_point_of_a_sweep_is_exported_as_the_run_alone(tmp_path):
    """FedAvg+ trains when it serves: at the rate of the point, not of the first."""
    base = {**BASE, "algorithm": "fedavg_plus", "rounds": 1, "eval_every": 1}
    swept = runner.run_all({**base, "sweep": "learning_rate=.5,.001"})
    alone = runner.run({**base, "learning_rate": 0.001})
    flat = []
    for name, result in (("swept", swept["learning_rate=0.001,seed=0"]), ("alone", alone)):
        flat.append([load_file(path) for path in export.write_models(result, tmp_path / name)])
    chex.assert_trees_all_close(*flat, rtol=1e-6, atol=1e-7)


def test_files_that_are_no_models(finished, tmp_path):
    path = tmp_path / "x.safetensors"
    assert "cannot be read" in message(lambda: export.load(path))
    path.write_bytes(b"\x80\x04nothing")
    assert "cannot be read" in message(lambda: export.load(path))
    save_file({"a": np.zeros(2)}, path)
    assert "holds no model of this library" in message(lambda: export.load(path))
    (good,) = export.write_models(finished[0], tmp_path / "out", [0])

    def told(**changes):
        return {"fedjax_pfl": json.dumps({**export.describe(good), **changes})}

    flat = load_file(good)
    wrong = {**flat, "params/fc1/kernel": flat["params/fc1/kernel"][:-1]}
    for arrays in (wrong, {k: v for k, v in flat.items() if "fc2" not in k}):
        save_file(arrays, path, metadata=told())
        assert "its network and its arrays do not fit" in message(lambda: export.load(path))
    save_file(flat, path, metadata=told(model={"kind": "os.system"}))
    assert "do not fit" in message(lambda: export.load(path))
    save_file(flat, path, metadata=told(format=2))
    assert "holds no model of this library" in message(lambda: export.load(path))


def test_without_the_package_a_line_says_so(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    line = message(lambda: export.write_models(finished[0], tmp_path))
    assert line.startswith("models are written with safetensors, which is missing")
