"""A run that is made longer in its directory, and what cannot be."""

import json
import shutil

import pytest

from fedjax_pfl.algorithms import fedavg
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from tests.runs.common import BASE, PHASES, assert_same_bits, undisturbed, untimed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

SHORT = {**BASE, "rounds": 4}  # of the six that BASE has


def refused(config, directory, **own):
    """The line with which a directory is refused, which stays as it is."""
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as error:
        runner.run(config, directory, **own)
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert before == after
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_finished_run_goes_on_to_more_rounds(tmp_path):
    runner.run(SHORT, tmp_path)
    longer, whole = runner.run(BASE, tmp_path), undisturbed(BASE)
    assert longer.resumed_at == 4
    assert_same_bits(longer.state, whole.state)
    assert untimed(longer.metrics) == untimed(whole.metrics)
    assert longer.clients == whole.clients
    assert json.loads((tmp_path / "config.json").read_text())["rounds"] == 6
    assert (tmp_path / "report.html").is_file()
    assert runner.run(BASE, tmp_path).resumed_at == 6
    assert "rounds (6 there, 4 here); choose another" in refused(SHORT, tmp_path)
    other = {**BASE, "rounds": 8, "batch_size": 9}
    assert "batch_size (8 there, 9 here); rounds (6 there" in refused(other, tmp_path)


def test_the_last_phase_can_be_longer_and_no_other(tmp_path):
    first, last = PHASES["phases"]
    runner.run({**PHASES, "phases": (first, {**last, "rounds": 1})}, tmp_path)
    longer = runner.run(PHASES, tmp_path)
    assert_same_bits(longer.state, undisturbed(PHASES).state)
    line = refused({**PHASES, "phases": ({**first, "rounds": 3}, last)}, tmp_path)
    assert "phases[0].rounds (2 there, 3 here); choose" in line


def test_drops_of_the_rate_are_shares_of_the_length(tmp_path):
    drops = {"learning_rate_drops": (0.5,)}
    runner.run({**SHORT, **drops}, tmp_path)
    line = refused({**BASE, **drops}, tmp_path)
    assert "rounds (4 there, 6 here); it cannot be made longer, because learning_rate_drops" in line


def test_a_copied_checkpoint_of_a_shorter_run_whose_rate_drops_is_refused(tmp_path):
    """Its rate has dropped earlier; without drops the same copy is gone on from."""
    for name, own in (("drops", {"learning_rate_drops": (0.5,)}), ("even", {})):
        short, long = tmp_path / name / "short", tmp_path / name / "long"
        runner.run({**SHORT, **own}, short)
        runner.run({**BASE, **own}, long)
        (long / "report.html").unlink()
        shutil.rmtree(long / "checkpoints")
        shutil.copytree(short / "checkpoints", long / "checkpoints")
        if own:
            line = refused({**BASE, **own}, long)
            assert "rounds (4 there, 6 here); it cannot be made longer, because learn" in line
        else:
            assert_same_bits(runner.run(BASE, long).state, undisturbed(BASE).state)


def scheduled(model, training, federation, *, rounds: int = 1):
    """FedAvg as a method that asks for the number of rounds."""
    assert rounds in (SHORT["rounds"], BASE["rounds"])
    return fedavg(model, training, federation)


def test_a_user_method_with_a_schedule_cannot_be_extended(tmp_path):
    runner.run(SHORT, tmp_path, algorithm=scheduled)
    line = refused(BASE, tmp_path, algorithm=scheduled)
    assert "because scheduled has a schedule over all rounds" in line


@pytest.mark.parametrize(("method", "fixed"), [("fedmn", True), ("fedavg", False)])
def test_which_methods_have_a_schedule(method, fixed):
    given = {**BASE, "algorithm": method, "momentum": 0.0, "keep_optimizer": False}
    small = {"layout": (2, 2), "width": 4, "hidden": 4, "x_size": 3, "y_size": 2}
    made = build.build(configuration.complete({**given, "fedmn": small}))
    assert bool(build.fixed_length_reason(made)) is fixed
