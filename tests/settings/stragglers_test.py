"""Tests of the settings of simulated time: traces, local steps, refusals, and runs."""

import chex
import numpy as np
import pytest

from fedjax_pfl.runs import checkpoints, runner
from fedjax_pfl.settings.stragglers import read_trace
from tests.commands import message
from tests.runs.common import (
    BASE,
    assert_same_bits,
    assert_same_run,
    at_step,
    kill,
    read_metrics,
)
from tests.settings.configuration_test import built

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

SPEEDS = {"step_seconds": 2.0, "speed_spread": 1.0, "bandwidth": 100.0}
TIMED = {**BASE, **SPEEDS, "deadline": 10.0}
PARTIAL = {"step_seconds": 2.0, "speed_spread": 1.0, "deadline": 4.0, "late": "partial"}
PRIVACY = {"privacy": "client", "privacy_clip_norm": 1.0, "privacy_noise": 1.0}
IMPOSSIBLE = "late=partial is not possible here:"


@pytest.mark.parametrize("name", ["trace.csv", "trace.npy"])
def test_a_trace_is_read_exactly(tmp_path, name):
    path, columns = str(tmp_path / name), np.float32([[0.1, 2, 3e5], [1e6, 7.5, 0.25]])
    if name.endswith("npy"):
        np.save(path, columns.T)
    else:
        (tmp_path / name).write_text("step_seconds,bandwidth\n0.1,1e6\n2,7.5\n3e5,.25\n")
    np.testing.assert_array_equal(read_trace(path, 3), columns)


@pytest.mark.parametrize("names", ["", "step_seconds\n"])
def test_a_first_number_may_start_with_a_point(tmp_path, names):
    (tmp_path / "trace.csv").write_text(f"{names}.02\n+.03\n0.04\n")
    (seconds,) = read_trace(str(tmp_path / "trace.csv"), 3)
    np.testing.assert_array_equal(seconds, np.float32([0.02, 0.03, 0.04]))


def test_a_byte_order_mark_is_no_row_of_names(tmp_path):
    (tmp_path / "trace.csv").write_text("0.1\n0.2\n", encoding="utf-8-sig")
    (seconds,) = read_trace(str(tmp_path / "trace.csv"), 2)
    np.testing.assert_array_equal(seconds, np.float32([0.1, 0.2]))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive"])
def test_a_file_that_is_no_array_is_refused(tmp_path, content):
    path = tmp_path / "trace.npy"
    path.write_bytes(content)
    line = message(lambda: read_trace(str(path), 2))
    assert line.startswith(f"speed_trace {path} is no table of numbers")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("1\n2\n", "has 2 rows and 1 columns; it needs 3 rows"),
        ("1\n2\n3\n4\n", "has 4 rows"),
        ("1,1,1\n2,2,2\n3,3,3\n", "3 columns; it needs 3 rows, one for each client, and 1 or 2"),
        ("1\n0\n3\n", "has 0 for client 1; give it a number above 0"),
        ("1\n2\n-3\n", "has -3 for client 2"),
        ("1,1\n2,2\n3,nan\n", "has nan for client 2"),
        ("1\n2\ninf\n", "has inf for client 2"),
        ("1\n2,2\n3\n", "is no table of numbers"),
        ("1\ntwo\n3\n", "is no table of numbers"),
        ("", "is no table of numbers"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path, text, fragment):
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    line = message(lambda: read_trace(str(path), 3))
    assert line.startswith(f"speed_trace {path} ")
    assert fragment in line


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"deadline": 1.0}, "deadline needs step_seconds or speed_trace; set one of them"),
        ({"bandwidth": 1.0}, "bandwidth needs step_seconds or speed_trace"),
        ({"speed_spread": 1.0}, "speed_spread needs step_seconds or speed_trace"),
        ({"step_seconds": 1.0, "speed_trace": "x.csv"}, "speed_trace replaces step_seconds"),
        ({"step_seconds": 0.0}, "step_seconds is 0.0; it must be above 0"),
        ({"late": "partial"}, "late needs step_seconds or speed_trace"),
        ({"step_seconds": 1.0, "late": "partial"}, "late=partial needs a deadline"),
        (PARTIAL | {"late": "never"}, "late is 'never'"),
        (PARTIAL | {"algorithm": "pfedla"}, "late=partial is for methods whose server makes one"),
        (PARTIAL | {"algorithm": "ditto"}, f"{IMPOSSIBLE} the method trains more than once"),
        (PARTIAL | {"algorithm": "fedrep"}, f"{IMPOSSIBLE} the method trains more than once"),
        (PARTIAL | {"algorithm": "pfedme"}, f"{IMPOSSIBLE} the server's update is no mean"),
        (PARTIAL | {"algorithm": "fedala"}, f"{IMPOSSIBLE} a client's upload differs from its"),
        (PARTIAL | {"algorithm": "fedcp"}, f"{IMPOSSIBLE} a client's upload differs from its"),
        (PARTIAL | {"robust_rule": "median"}, "late=partial needs the mean of the uploads"),
        (
            PARTIAL | PRIVACY | {"sampling": "cyclic"},
            "late=partial scales updates, which privacy does not cover",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, line):
    assert message(lambda: built({**BASE, **settings})).startswith(line)


def test_a_changed_trace_is_refused(tmp_path):
    path, workdir = tmp_path / "trace.csv", tmp_path / "run"
    path.write_text("1\n2\n3\n")
    settings = {**BASE, "speed_trace": str(path), "rounds": 1}
    assert runner.run(settings, workdir).metrics[-1]["simulated_seconds"] in (4.0, 6.0)
    path.write_text("1\n2\n4\n")
    assert "other client speeds" in message(lambda: runner.run(settings, workdir))


def test_local_steps_count_every_training_of_a_method():
    """The clients have 20 examples, 12 of them for training: two batches of 8 in an epoch."""
    for method, steps in (("fedavg", 6), ("ditto", 12), ("local", 6)):
        experiment = built({**BASE, **SPEEDS, "algorithm": method, "local_epochs": 3})
        spec = experiment.phases[0].inputs.function_maker(1)(experiment.phases[0].algorithm).spec
        np.testing.assert_array_equal(spec.speeds.steps, [steps] * 3)


def test_a_run_without_late_clients_is_the_plain_run():
    timed, plain = (runner.run({**BASE, **settings}) for settings in (SPEEDS, {}))
    assert_same_bits(timed.state, plain.state)
    assert timed.ledger == plain.ledger
    assert not {"simulated_seconds", "late"} & plain.metrics[-1].keys()
    seconds = [line["simulated_seconds"] for line in timed.metrics]
    assert 0 < seconds[0] < seconds[1] < seconds[2]
    assert timed.metrics[-1]["late"] == 0


@pytest.mark.slow("four runs each")
@pytest.mark.parametrize("settings", [TIMED, {**BASE, **PARTIAL, "local_epochs": 3}])
def test_resumed_runs_and_other_devices_and_stores_give_the_same_seconds(tmp_path, settings):
    expected = runner.run(settings)
    assert expected.metrics[-1]["late"] > 0
    simulated = [(line["simulated_seconds"], line["late"]) for line in expected.metrics]
    with kill(checkpoints.Store, "save", at_step(3)):
        runner.run(settings, tmp_path / "run")
    resumed = runner.run(settings, tmp_path / "run")
    assert resumed.resumed_at
    assert_same_run(resumed, expected, tmp_path / "run")
    changes = ({"devices": 1, "chunk": 2}, {"store": "host"})
    others = [runner.run({**settings, **change}) for change in changes]
    for other in others:
        chex.assert_trees_all_close(other.state.server, expected.state.server, atol=1e-5)
    for metrics in (read_metrics(tmp_path / "run"), *(other.metrics for other in others)):
        assert [(line["simulated_seconds"], line["late"]) for line in metrics] == simulated


@pytest.mark.slow("four runs")
def test_partial_work_with_transforms():
    """A server optimiser, compression and a private head do not change who is late."""
    plain = {**BASE, **PARTIAL, "local_epochs": 3, "rounds": 2, "dropout": 0.0}
    others = ({"server_optimizer": "adam"}, {"upload_bits": 8}, {"keep_head": True})
    lines = [runner.run({**plain, **change}).metrics[-1] for change in ({}, *others)]
    assert lines[0]["late"] > lines[0]["dropped"]
    for line in lines[1:]:
        for name in ("late", "dropped", "simulated_seconds"):
            assert line[name] == lines[0][name]


@pytest.mark.slow("two runs")
def test_a_deadline_that_no_client_misses_gives_the_plain_run():
    """Every client has 12 training examples, so all do equally many steps."""
    partial = runner.run({**BASE, **PARTIAL, "deadline": 1e6})
    assert_same_bits(partial.state, runner.run(BASE).state)
