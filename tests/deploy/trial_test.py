"""A trial over Flower that is ended in the midst, in each way, and goes on by the same command."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedjax_pfl.deploy import guard, run, schema
from fedjax_pfl.presets import pfedla
from fedjax_pfl.runs import export, runner
from tests.deploy.run_test import close
from tests.runs.common import read_metrics

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

ROUNDS, NODES, LIMIT = 4, 2, 400.0
WORDS = ("--config=pfedla:digits", f"--nodes={NODES}")
CHANGES = {"rounds": ROUNDS, "eval_every": 1, "model": "mlp", "clients": NODES}


def command(folder: Path) -> "subprocess.Popen[str]":
    settings = [f"--config.{name}={value}" for name, value in CHANGES.items()]
    places = [f"--workdir={folder / 'real'}", f"--folder={folder / 'nodes'}"]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.deploy", *WORDS, *settings, *places],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def evaluations(folder: Path) -> int:
    path = folder / "real" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def ended(folder: Path, number: int, after: int) -> str:
    """The trial's output; it is sent a signal after so many evaluations."""
    started, until = command(folder), time.monotonic() + LIMIT
    try:
        while evaluations(folder) < after:
            assert started.poll() is None, started.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)
        assert guard.running_processes(folder / "nodes" / "flwr")
        os.kill(started.pid, number)
        said = started.communicate(timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while guard.running_processes(folder / "nodes" / "flwr"):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert evaluations(folder) < ROUNDS
    return said


@pytest.mark.slow("it starts Flower four times, which takes minutes")
def test_a_trial_that_was_ended_goes_on_and_ends_as_one_that_was_not(tmp_path: Path):
    config = pfedla.get_config("digits")
    config.update(CHANGES)
    simulated = runner.run(config, tmp_path / "simulated")
    for after, number in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGINT), start=1):
        said = ended(tmp_path, number, after)
        assert "Traceback" not in said
        assert ("give the same command again" in said) == (number != signal.SIGKILL)
    last = command(tmp_path)
    said = last.communicate(timeout=LIMIT)[0]
    assert last.returncode == 0, said
    assert guard.running_processes(tmp_path / "nodes" / "flwr") == []
    close(read_metrics(tmp_path / "real"), simulated.metrics)
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "real" / run.WIRE_FILE).read_text().splitlines()
    ]
    assert len({line["round"] for line in lines}) == len(lines)
    known = run.storage.read_json(tmp_path / "real" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert known["starts"] == 3
    traffic = [(tmp_path / name / "traffic.json").read_text() for name in ("real", "simulated")]
    assert traffic[0] == traffic[1]
    for i in range(NODES):
        (path,) = (tmp_path / "nodes" / f"node-{i}").glob("run-*/model.safetensors")
        assert export.describe(path)["client"] == i
