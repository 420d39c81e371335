"""What a run tells while it goes on, how Ctrl-C ends it, and models that are not finite."""

import json
import signal

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl import algorithms
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.scores import ACCURACY, SQUARED_ERROR
from fedjax_pfl.report import page as report
from fedjax_pfl.report import references, run_reader
from fedjax_pfl.runs import interrupt, progress, run_state
from fedjax_pfl.runs.result import run_record
from fedjax_pfl.settings import configuration

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

SHORT = {
    "clients": 4,
    "rounds": 4,
    "eval_every": 2,
    "model": "mlp",
    "validation_fraction": 0.2,
    "evaluate_after": False,
}


def test_a_line_of_an_evaluation_to_the_letter():
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
    other = line | {"before": {"accuracy_mean": 0.6, "loss": 1.5}, "after": {"accuracy_mean": 1.0}}
    assert progress.evaluation_line(ACCURACY, [line, other], 50) == (
        "round 10 of 50 (2 runs, mean): accuracy 70.61 % before, 100.00 % after, loss 1.0000, "
        "2.47 MB, 24.7 s"
    )
    lost = line | {"before": {"squared_error_mean": None, "loss": None}}
    assert progress.evaluation_line(SQUARED_ERROR, [lost], 50) == (
        "round 10 of 50: squared error not finite, 1.23 MB, 12.3 s"
    )


def test_a_line_says_of_which_run_it_is_where_there_are_several():
    for name, said in (("seed=1", "seed=1: no model"), ("", "no model")):
        member = run_state.SweepRun(name, configuration.default(), {})
        assert progress.with_run_name(member, "no model") == said


def test_a_model_of_nan_has_no_score(tmp_path, capfd):
    """That after local training at such a rate; uploads of it are rejected, and it validates."""
    config = {**SHORT, "learning_rate": 1e30, "evaluate_after": True, "validate_after": True}
    result = fedjax_pfl.run(config, tmp_path / "run")
    last = result.metrics[-1]
    assert (last["before"]["clients"], last["before"]["not_finite"]) == (4, 0)
    for part in (last["after"], last["validation"]):
        assert (part["accuracy_mean"], part["loss"]) == (None, None)
        assert (part["clients"], part["not_finite"]) == (0, 4)
    assert last["best_round"] is None
    assert all(row["after_accuracy"] is None for row in result.clients)
    told = capfd.readouterr().err.splitlines()
    named = [line for line in told if "the evaluation of clients 0, 1, 2, 3 is not finite" in line]
    assert len(named) == 1
    rounds = [line for line in told if line.startswith("round ") and " of 4: accuracy" in line]
    assert [line.split(":")[0] for line in rounds] == ["round 2 of 4", "round 4 of 4"]
    # What is damaged later is written again, by the same call.
    table = (tmp_path / "run" / "clients.csv").read_bytes()
    for name in ("clients.csv", "traffic.json", "metrics.jsonl"):
        (tmp_path / "run" / name).write_bytes(b"\x00\xff")
        with pytest.raises(UsageError, match="give the run's command again"):
            run_reader.read(tmp_path / "run")
        fedjax_pfl.run(config, tmp_path / "run")
        assert run_reader.read(tmp_path / "run").finished
    assert (tmp_path / "run" / "clients.csv").read_bytes() == table


def test_ctrl_c_from_python_saves_and_says_so(tmp_path, capfd):
    real = progress.evaluation

    def pressed(*arguments):
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "evaluation", pressed)
        with pytest.raises(KeyboardInterrupt, match="stopped at round 2; the same call goes on"):
            fedjax_pfl.run(SHORT, tmp_path)
    assert "stopping when these rounds are saved" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result = fedjax_pfl.run(SHORT, tmp_path)
    assert result.resumed_at == 2
    assert [line["round"] for line in result.metrics] == [2, 4]


def test_ctrl_c_ends_at_once_where_nothing_is_being_saved():
    with interrupt.on_keyboard(saves=True) as stop:
        with pytest.raises(KeyboardInterrupt, match="run the same call again to resume"):
            signal.raise_signal(signal.SIGINT)
        with stop.protected():
            signal.raise_signal(signal.SIGINT)
            assert stop.exit_status == 130
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    with interrupt.on_keyboard(saves=False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "a.b", "a b"])
def test_an_observation_is_called_as_a_file_can_be(tmp_path, name):
    def ours(model, training, federation):
        made = algorithms.local(model, training, federation)
        return made._replace(observe=lambda state: {name: np.zeros(2)})

    with pytest.raises(UsageError, match="use letters, digits and _"):
        fedjax_pfl.run(SHORT, tmp_path / "run", algorithm=ours)
    assert not (tmp_path / "run").exists()


def test_a_client_with_one_example_takes_part(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(21, 3)).astype(np.float32)
    y = (x @ np.array([[1.0, 0], [0, 2.0], [1, 1]])).astype(np.float32)
    owners = np.array([1] + 20 * [0])
    dataset = fedjax_pfl.arrays(x, y, owners=owners, name="pair")
    config = {"partition": "natural", "model": "mlp", "clients": 2, "rounds": 2, "eval_every": 2}
    result = fedjax_pfl.run(config, tmp_path, dataset=dataset)
    lone, many = sorted(result.clients, key=lambda row: row["train_examples"])
    assert (lone["train_examples"], lone["test_examples"], lone["visits"]) == (1, 0, 2)
    assert lone["before_squared_error"] is None
    before = result.metrics[-1]["before"]
    assert (before["clients"], before["not_finite"]) == (1, 0)
    # A regression: one number everywhere, and its root beside it.
    assert before["squared_error_mean"] == before["loss"] == many["before_loss"]
    assert before["rmse_mean"] == pytest.approx(before["squared_error_mean"] ** 0.5)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["before"] == before


def test_clients_of_one_pooled_example_take_part():
    """Of six examples for five clients one is tested on, by the only client that has two."""
    x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
    config = {"partition": "iid", "model": "mlp", "clients": 5, "rounds": 1}
    result = fedjax_pfl.run(config, dataset=fedjax_pfl.arrays(x, y, name="six"))
    assert [(row["train_examples"], row["visits"]) for row in result.clients] == [(1, 1)] * 5
    for stage in ("before", "after"):
        own = [row[f"{stage}_accuracy"] for row in result.clients if row["test_examples"]]
        rest = [row[f"{stage}_accuracy"] for row in result.clients if not row["test_examples"]]
        assert rest == [None] * 4
        mean = result.metrics[-1][stage]
        assert (mean["clients"], mean["not_finite"], mean["accuracy_mean"]) == (1, 0, own[0])


def test_references_are_run_beside_it_and_answer_whether_it_helped(
    tmp_path, monkeypatch, write_page
):
    config = {**SHORT, "algorithm": "fedprox", "rounds": 2, "reference": True}
    with pytest.raises(UsageError, match="reference is for a run with a workdir"):
        fedjax_pfl.run(config)
    result = fedjax_pfl.run(config, tmp_path / "run")
    record = run_record(result)
    assert record.provenance["began"].endswith("UTC")
    assert "jax " in record.provenance["versions"]
    found = references.find(record)
    assert list(found) == ["FedAvg", "Local"]
    for name, method in (("FedAvg", "fedavg"), ("Local", "local")):
        other = found[name]
        assert other.directory == tmp_path / "run" / "reference" / method
        assert other.config["algorithm"] == method
        same = {key: other.config[key] for key in ("seed", "rounds", "clients", "learning_rate")}
        assert same == {key: result.config[key] for key in same}
    # With another run beside it that has the same work, none is run again.
    again = fedjax_pfl.run({**config, "algorithm": "fedper"}, tmp_path / "other")
    assert not (again.directory / "reference").exists()
    # Or it is told which: the report of a run that has ended is written anew.
    monkeypatch.setattr(report, "write", write_page)
    path = result.directory / "reference" / "local"
    told = {**config, "algorithm": "fedper", "reference": False, "beside": f" {path},"}
    alone = fedjax_pfl.run({**told, "beside": ""}, tmp_path / "away" / "alone")
    assert ">Local</text>" not in (alone.directory / "report.html").read_text()
    alone = fedjax_pfl.run(told, tmp_path / "away" / "alone")
    page = (alone.directory / "report.html").read_text()
    assert ">Local</text>" in page
    assert "As served it is" in page
    with pytest.raises(UsageError, match="cannot be compared with this run: it differs in seed"):
        fedjax_pfl.run({**told, "seed": 5}, tmp_path / "away" / "five")
    with pytest.raises(UsageError, match="nowhere is not a run directory"):
        fedjax_pfl.run({**told, "beside": "nowhere"}, tmp_path / "away" / "alone")
    assert not (tmp_path / "away" / "five").exists()
