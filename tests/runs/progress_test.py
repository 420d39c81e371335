"""Tests of progress messages, of models that are not finite, and of reference runs."""

import json
import os
import shutil

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl import algorithms
from fedjax_pfl.core.metrics import ACCURACY, SQUARED_ERROR
from fedjax_pfl.report import page as report
from fedjax_pfl.report import references, run_reader
from fedjax_pfl.runs import progress, reference_runs, run_state
from fedjax_pfl.runs.result import run_record
from fedjax_pfl.settings import configuration
from tests.commands import message

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

SHORT = {
    "clients": 4,
    "rounds": 4,
    "eval_every": 2,
    "model": "mlp",
    "validation_fraction": 0.2,
    "evaluate_after": False,
}


def test_the_line_of_an_evaluation():
    line = {
        "round": 10,
        "before": {"accuracy_mean": 0.8122, "loss": 0.5},
        "after": None,
        "bytes_down": 1_000_000,
        "bytes_up": 234_000,
        "seconds": 12.34,
    }
    assert progress.evaluation_line(ACCURACY, [line], 50) == (
        "round 10 of 50: accuracy 81.22 % before, loss 0.5000, 1.23 MB, 12.3 s"
    )
    tuned = line | {"before": {"accuracy_mean": 0.6, "loss": 1.5}, "after": {"accuracy_mean": 1.0}}
    assert progress.evaluation_line(ACCURACY, [line, tuned], 50) == (
        "round 10 of 50 (2 runs: mean scores, total bytes and time): accuracy 70.61 % before, "
        "100.00 % after, loss 1.0000, "
        "2.47 MB, 24.7 s"
    )
    lost = line | {"before": {"squared_error_mean": None, "loss": None}}
    assert progress.evaluation_line(SQUARED_ERROR, [lost], 50) == (
        "round 10 of 50: squared error not finite, 1.23 MB, 12.3 s"
    )
    for name, expected in (("seed=1", "seed=1: no model"), ("", "no model")):
        run = run_state.SweepRun(name, configuration.default(), {})
        assert progress.with_run_name(run, "no model") == expected


def test_test_examples_do_not_choose_the_best_round():
    """The test loss is infinite in every round, the validation loss is not."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=40)
    dataset = fedjax_pfl.arrays(x, y, x[:4], np.full(4, 1e25))
    config = {**SHORT, "split": "official", "partition": "iid", "rounds": 1, "eval_every": 1}
    (line,) = fedjax_pfl.run({**config, "clients": 2}, dataset=dataset).metrics
    assert (line["before"]["not_finite"], line["best_round"]) == (2, 1)


def test_models_of_nan_have_no_score(tmp_path, capfd):
    """Trains to NaN, so uploads are rejected and there is no validated model."""
    config = {**SHORT, "learning_rate": 1e30, "evaluate_after": True, "validate_after": True}
    directory = tmp_path / "run"
    result = fedjax_pfl.run(config, directory)
    last = result.metrics[-1]
    assert (last["before"]["clients"], last["before"]["not_finite"]) == (4, 0)
    for part in (last["after"], last["validation"]):
        assert (part["accuracy_mean"], part["loss"]) == (None, None)
        assert (part["clients"], part["not_finite"]) == (0, 4)
    assert last["best_round"] is None
    assert all(row["after_accuracy"] is None for row in result.clients)
    err = capfd.readouterr().err
    assert err.count("the evaluation of clients 0, 1, 2, 3 is not finite") == 1
    rounds = [line for line in err.splitlines() if " of 4: accuracy" in line]
    assert [line.split(":")[0] for line in rounds] == ["round 2 of 4", "round 4 of 4"]
    # The same call repairs damaged files.
    table = (directory / "clients.csv").read_bytes()
    for name in ("clients.csv", "traffic.json", "metrics.jsonl"):
        (directory / name).write_bytes(b"\x00\xff")
        assert "run the command again" in message(run_reader.read, directory)
        fedjax_pfl.run(config, directory)
        assert run_reader.read(directory).finished
    assert (directory / "clients.csv").read_bytes() == table


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *((name, "use letters, digits and _") for name in ("../evil", "", "a.b", "a b")),
        ("clients", "is a figure of every report; choose another name"),
        ("client_group", "is a column of every clients.csv; choose another name"),
        ("client_best_after_loss", "is a column of every clients.csv; choose another name"),
    ],
)
def test_names_of_diagnostics_must_be_file_names(tmp_path, name, remedy):
    def mine(model, training, federation):
        algorithm = algorithms.local(model, training, federation)
        return algorithm._replace(observe=lambda state: {name: np.zeros(2)})

    line = message(lambda: fedjax_pfl.run(SHORT, tmp_path / "run", algorithm=mine))
    assert remedy in line
    assert not (tmp_path / "run").exists()


def test_a_client_with_one_example_takes_part(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(21, 3)).astype(np.float32)
    y = (x @ np.array([[1.0, 0], [0, 2.0], [1, 1]])).astype(np.float32)
    dataset = fedjax_pfl.arrays(x, y, owners=np.array([1] + 20 * [0]), name="pair")
    config = {"partition": "natural", "model": "mlp", "clients": 2, "rounds": 2, "eval_every": 2}
    result = fedjax_pfl.run(config, tmp_path, dataset=dataset)
    small, large = sorted(result.clients, key=lambda row: row["train_examples"])
    assert (small["train_examples"], small["test_examples"], small["client_updates"]) == (1, 0, 2)
    assert small["before_squared_error"] is None
    scores = result.metrics[-1]["before"]
    assert (scores["clients"], scores["not_finite"]) == (1, 0)
    assert scores["squared_error_mean"] == scores["loss"] == large["before_loss"]
    assert scores["rmse_mean"] == pytest.approx(scores["squared_error_mean"] ** 0.5)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["before"] == scores


def test_clients_with_one_pooled_example_take_part():
    """Splits six examples among five clients; only one client has a test example."""
    x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
    config = {"partition": "iid", "model": "mlp", "clients": 5, "rounds": 1}
    result = fedjax_pfl.run(config, dataset=fedjax_pfl.arrays(x, y, name="six"))
    assert [(row["train_examples"], row["client_updates"]) for row in result.clients] == [
        (1, 1)
    ] * 5
    for stage in ("before", "after"):
        (tested,) = [row[f"{stage}_accuracy"] for row in result.clients if row["test_examples"]]
        accuracies = [row[f"{stage}_accuracy"] for row in result.clients]
        assert accuracies.count(None) == 4
        mean = result.metrics[-1][stage]
        assert (mean["clients"], mean["not_finite"], mean["accuracy_mean"]) == (1, 0, tested)


def test_late_clients_of_reference_runs(tmp_path):
    """Local refuses late=partial."""
    settings = {**SHORT, "step_seconds": 1.0, "deadline": 2.0, "late": "partial", "reference": True}
    config = configuration.complete({**settings, "algorithm": "fedprox"})
    run = run_reader.Run(directory=tmp_path, config=configuration.resolve(config), metrics=[])
    missing = reference_runs.missing_runs(run, config, configuration.BUILTINS)
    late = {path.name: config.late for path, config in missing.items()}
    assert late == {"fedavg": "partial", "local": "missing"}


def test_reference_runs(tmp_path, monkeypatch, write_page):
    config = {**SHORT, "algorithm": "fedprox", "rounds": 2, "reference": True}
    line = message(lambda: fedjax_pfl.run(config))
    assert "reference is for a run with a workdir" in line
    result = fedjax_pfl.run(config, tmp_path / "run")
    record = run_record(result)
    assert record.provenance["started"].endswith("UTC")
    assert "jax " in record.provenance["versions"]
    runs = references.find(record)
    assert list(runs) == ["FedAvg", "Local"]
    for run, method in zip(runs.values(), ("fedavg", "local"), strict=True):
        assert run.directory == tmp_path / "run" / "reference" / method
        assert run.config["algorithm"] == method
        for key in ("seed", "rounds", "clients", "learning_rate"):
            assert run.config[key] == result.config[key]
    # A second run in the same folder shares the references of the first.
    second = fedjax_pfl.run({**config, "algorithm": "fedper"}, tmp_path / "other")
    assert not (second.directory / "reference").exists()
    monkeypatch.setattr(report, "write", write_page)
    # A repeated run gets a new report only after a reference run has finished.
    page, reference = result.directory / "report.html", runs["Local"].directory / "report.html"
    config["reference"] = False
    for seconds, is_new in ((-1, False), (1, True)):
        page.write_text("old")
        os.utime(reference, ns=(0, page.stat().st_mtime_ns + seconds * 10**9))
        os.utime(runs["FedAvg"].directory / "report.html", (0, 0))
        fedjax_pfl.run(config, tmp_path / "run")
        assert (page.read_text() != "old") == is_new
    # The setting names a reference elsewhere; a finished run gets a new report.
    path, directory = result.directory / "reference" / "local", tmp_path / "away" / "alone"
    config = {**config, "algorithm": "fedper"}

    def report_with(reference):
        result = fedjax_pfl.run({**config, "reference_runs": reference}, directory)
        return (result.directory / "report.html").read_text()

    assert ">Local</text>" not in report_with("")
    html = report_with(f" {path},")
    assert ">Local</text>" in html
    assert "As served it is" in html
    other = shutil.copytree(path, tmp_path / "away" / "f1")
    metrics = other / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"accuracy_', '"macro_f1_'))
    assert "run: it has no accuracy; run it again" in message(report_with, str(other))
    config["seed"] = 5
    directory = tmp_path / "away" / "five"
    line = message(report_with, f" {path},")
    assert "cannot be compared with this run: it differs in seed" in line
    assert "nowhere is not a run directory" in message(report_with, "nowhere")
    assert not directory.exists()
