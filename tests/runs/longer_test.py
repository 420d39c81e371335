"""Tests of runs that continue with more rounds, and of runs that cannot."""

import json
import shutil

import pytest

from fedjax_pfl.algorithms import fedavg
from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from tests.runs.common import BASE, PHASES, assert_same_bits, refusal, undisturbed, untimed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

SHORT = {**BASE, "rounds": 4}  # of the six rounds of BASE
DROPS = {"learning_rate_drops": (0.5,)}


def test_a_finished_run_continues_to_more_rounds(tmp_path, monkeypatch):
    runner.run(SHORT, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "example_facts", lambda *arguments: {"digest": "another"})
        assert "data.json is missing or damaged" in refusal(BASE, tmp_path)
    longer, expected = runner.run(BASE, tmp_path), undisturbed(BASE)
    assert longer.resumed_at == 4
    assert_same_bits(longer.state, expected.state)
    assert untimed(longer.metrics) == untimed(expected.metrics)
    assert longer.clients == expected.clients
    assert json.loads((tmp_path / "config.json").read_text())["rounds"] == 6
    assert (tmp_path / "report.html").is_file()
    assert runner.run(BASE, tmp_path).resumed_at == 6
    assert "rounds (6 there, 4 here); choose another" in refusal(SHORT, tmp_path)
    changed = {**BASE, "rounds": 8, "batch_size": 9}
    assert "batch_size (8 there, 9 here); rounds (6 there" in refusal(changed, tmp_path)


def test_only_the_last_phase_can_be_longer(tmp_path):
    first, last = PHASES["phases"]
    runner.run({**PHASES, "phases": (first, {**last, "rounds": 1})}, tmp_path)
    assert_same_bits(runner.run(PHASES, tmp_path).state, undisturbed(PHASES).state)
    line = refusal({**PHASES, "phases": ({**first, "rounds": 3}, last)}, tmp_path)
    assert "phases[0].rounds (2 there, 3 here); choose" in line


def test_a_run_whose_learning_rate_drops_cannot_be_longer(tmp_path):
    """Drops are fractions of all rounds."""
    runner.run({**SHORT, **DROPS}, tmp_path)
    line = refusal({**BASE, **DROPS}, tmp_path)
    assert "rounds (4 there, 6 here); it cannot be made longer, because learning_rate_drops" in line


@pytest.mark.parametrize("drops", [DROPS, {}], ids=["drops", "constant"])
def test_checkpoints_of_a_shorter_run_with_learning_rate_drops_are_refused(drops, tmp_path):
    short, long = tmp_path / "short", tmp_path / "long"
    runner.run({**SHORT, **drops}, short)
    runner.run({**BASE, **drops}, long)
    (long / "report.html").unlink()
    shutil.rmtree(long / "checkpoints")
    shutil.copytree(short / "checkpoints", long / "checkpoints")
    if drops:
        line = refusal({**BASE, **drops}, long)
        assert "rounds (4 there, 6 here); it cannot be made longer, because learn" in line
    else:
        assert_same_bits(runner.run(BASE, long).state, undisturbed(BASE).state)


def scheduled(model, training, federation, *, rounds: int = 1):
    """FedAvg that asks for the number of rounds."""
    assert rounds in (SHORT["rounds"], BASE["rounds"])
    return fedavg(model, training, federation)


def test_a_user_defined_schedule_is_detected(tmp_path):
    runner.run(SHORT, tmp_path, algorithm=scheduled)
    line = refusal(BASE, tmp_path, algorithm=scheduled)
    assert "because scheduled has a schedule over all rounds" in line


@pytest.mark.parametrize(("method", "is_fixed"), [("fedmn", True), ("fedavg", False)])
def test_methods_with_a_schedule(method, is_fixed):
    settings = {**BASE, "algorithm": method, "momentum": 0.0, "keep_optimizer": False}
    small = {"layout": (2, 2), "width": 4, "hidden": 4, "x_size": 3, "y_size": 2}
    experiment = build.build(configuration.complete({**settings, "fedmn": small}))
    assert bool(build.fixed_length_reason(experiment)) is is_fixed
