"""Tests of metrics over clients against numbers worked out by hand."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.local_training import Scores
from fedjax_pfl.core.metrics import ACCURACY, PERPLEXITY, SQUARED_ERROR
from fedjax_pfl.core.task import Task, classification, regression, select_metrics
from fedjax_pfl.report import numbers
from fedjax_pfl.runs import progress, run_state
from fedjax_pfl.simulation import clients_csv, ledger, summaries
from fedjax_pfl.simulation.records import Evaluation, Log

TASK = Task(None, (ACCURACY._replace(name="a"),), has_classes=True)
NAMES = ["a_mean", "a_weighted", "a_std", "a_variance", "a_worst10", "loss"]


def scores(score, loss, examples, name="a") -> Scores:
    return Scores({name: np.float32(score)}, np.float32(loss), np.int32(examples))


def squared_errors(errors) -> Scores:
    """Returns scores of a regression with one example per client."""
    result = scores(errors, errors, [1] * len(errors), "squared_error")
    return result._replace(metrics=result.metrics | {"rmse": result.metrics["squared_error"]})


def summary(client_scores: Scores, task=TASK):
    return summaries.summary(client_scores, np.ones(len(client_scores.loss), bool), task)


def test_means_over_clients_and_over_examples():
    """Accuracies are 1.0 on 10 examples and 0 on 90; the mean loss is (0.5 + 2) / 2."""
    expected = dict(zip(NAMES, (0.5, 0.1, 0.5, 0.25, 0.0, 1.25), strict=True))
    assert summary(scores([10, 0], [5, 180], [10, 90])) == expected | {
        "clients": 2,
        "not_finite": 0,
    }


@pytest.mark.parametrize(("clients", "worst"), [(9, 0.0), (10, 0.0), (11, 0.05), (25, 0.1)])
def test_worst_tenth(clients: int, worst: float):
    """Accuracies are 0, 0.1, 0.2, ... in a random order; the worst tenth are 1, 1, 2, 3 clients."""
    order = np.random.default_rng(0).permutation(clients)
    result = summary(scores(order, order, [10] * clients))
    assert result["a_worst10"] == pytest.approx(worst)
    assert result["a_mean"] == pytest.approx((clients - 1) / 20)
    assert result["a_std"] == pytest.approx(np.sqrt((clients**2 - 1) / 12) / 10)


def test_inactive_clients_and_clients_without_examples_do_not_count():
    """Client 1 is inactive and client 2 has no examples; either would change every number."""
    active = np.array([True, False, True, True])
    result = summaries.summary(scores([1, 9, 0, 1], [2, 9, 0, 8], [2, 9, 0, 4]), active, TASK)
    expected = dict(zip(NAMES, (0.375, 2 / 6, 0.125, 1 / 64, 0.25, 1.5), strict=True))
    assert result == pytest.approx(expected | {"clients": 2, "not_finite": 0})
    assert summaries.summary(scores([0, 5], [0, 5], [0, 5]), np.array([True, False]), TASK) is None


def test_a_client_with_a_loss_that_is_not_finite_is_counted_and_left_out():
    """A model of NaN predicts class 0, so client 0 has half of its examples right."""
    lost = scores([1, 2, 3], [np.nan, 1, 2], [2, 2, 4])
    result = summary(lost)
    assert (result["a_mean"], result["a_weighted"], result["loss"]) == (0.875, 5 / 6, 0.5)
    assert (result["clients"], result["not_finite"]) == (2, 1)
    assert summaries.not_finite(lost, np.ones(3, bool), TASK) == [0]
    assert summaries.not_finite(lost, np.array([False, True, True]), TASK) == []
    rows = clients_csv.client_scores(Evaluation(lost, lost, None), TASK)
    assert (rows[0]["before_a"], rows[0]["before_loss"], rows[1]["before_a"]) == (None, None, 1.0)
    all_lost = summary(scores([1], [np.inf], [2]))
    assert all_lost == {**dict.fromkeys(NAMES), "clients": 0, "not_finite": 1}


def test_the_worst_errors_are_the_largest():
    """Errors are 1, 2, ..., 11; the two worst are 10 and 11."""
    result = summary(squared_errors(np.arange(1, 12)), regression())
    assert (result["squared_error_mean"], result["squared_error_worst10"]) == (6.0, 10.5)
    assert result["rmse_mean"] == pytest.approx(np.sqrt(np.arange(1, 12)).mean())
    assert next(iter(result)) == "squared_error_mean"  # readers take the first metric


def test_a_perplexity_that_overflows_makes_its_means_missing():
    """Losses are 1 and 800. With 1 and 400, the perplexities are finite but not their variance."""
    task = Task(None, (PERPLEXITY,), has_classes=True)
    overflow = scores([1, 800], [1, 800], [1, 1], "perplexity")
    result = summary(overflow, task)
    names = [f"perplexity_{name}" for name in ("mean", "weighted", "std", "variance", "worst10")]
    assert result == {**dict.fromkeys(names), "loss": 400.5, "clients": 2, "not_finite": 0}
    values = summaries.per_client(overflow, task)["perplexity"]
    assert values.tolist() == [np.exp(1), np.inf]
    rows = clients_csv.client_scores(Evaluation(overflow, overflow, None), task)
    assert [row["before_perplexity"] for row in rows] == [np.exp(1), None]
    large = summary(scores([1, 400], [1, 400], [1, 1], "perplexity"), task)
    assert (large["perplexity_worst10"], large["perplexity_variance"]) == (np.exp(400), None)
    recorder = Recorder(clients=2, task=task)
    recorder.evaluate(1, scores([2, 2], [2, 2], [1, 1], "perplexity"))
    recorder.evaluate(2, overflow)
    assert recorder.run.at.best_round == 1


class Recorder:
    """Records evaluations of a run without rounds."""

    def __init__(self, clients: int = 1, task=TASK):
        phase = SimpleNamespace(
            federation=SimpleNamespace(active=np.ones(clients, bool)),
            config=SimpleNamespace(algorithm="fedavg"),
            inputs=SimpleNamespace(evaluated=None, is_attacker=np.zeros(clients, bool)),
        )
        federation = SimpleNamespace(task=task)
        self.experiment = SimpleNamespace(
            phases=[phase, phase], federation=federation, statements=()
        )
        at = run_state.Position(ledger=ledger.empty(clients))
        self.run = run_state.SweepRun("", None, {}, at=at)

    def evaluate(self, t: int, client_scores: Scores):
        self.run.at = self.run.at._replace(round=t)
        evaluation = Evaluation(client_scores, client_scores, None)
        state = State((), (), ())
        return run_state.record_evaluation(self.experiment, self.run, evaluation, state, {})


def test_a_phase_does_not_inherit_the_best_of_the_previous_phase():
    """Evaluates a score that is not finite first, so the second phase has no best round."""
    recorder = Recorder()
    recorder.evaluate(1, scores([3], [1.0], [4]))
    assert recorder.run.at.clients[0]["best_before_a"] == 0.75
    recorder.run.at = recorder.run.at._replace(phase=1, best_round=None, best_score=None)
    recorder.evaluate(2, scores([np.nan], [1.0], [4]))
    assert (recorder.run.at.best_round, recorder.run.at.clients[0]["best_before_a"]) == (None, None)


@pytest.mark.parametrize(
    ("values", "losses", "best"),
    [
        ([0.5, 0.9, 0.7], [1, 1, 1], 2),
        ([0.5, 0.9, 0.7], [1, np.nan, 1], 3),  # a model of NaN predicts class 0
        ([0.5], [np.inf], None),
    ],
)
def test_the_best_round_has_the_best_finite_score(values, losses, best):
    recorder = Recorder()
    for t, (value, loss) in enumerate(zip(values, losses, strict=True), 1):
        recorder.evaluate(t, scores([value], [loss], [1]))
    assert recorder.run.at.best_round == best


def test_the_best_round_has_the_smallest_error():
    recorder = Recorder(task=regression())
    for t, error in enumerate([5, 2, 3], 1):
        recorder.evaluate(t, squared_errors([error]))
    assert recorder.run.at.best_round == 2


def test_a_round_with_one_lost_client_is_never_the_best():
    """The mean over the remaining clients is higher than in the round before."""
    recorder = Recorder(clients=2)
    recorder.evaluate(1, scores([2, 4], [1, 1], [4, 4]))
    lost = scores([0, 4], [np.nan, 1], [4, 4])
    assert recorder.evaluate(2, lost)["validation"]["a_mean"] == 1.0
    assert recorder.run.at.best_round == 1
    arguments = recorder.experiment, recorder.run, Evaluation(lost, lost, None)
    (line,) = progress.not_finite(*arguments)
    assert line.startswith("round 2: the evaluation of client 0 is not finite")
    assert not list(progress.not_finite(*arguments))  # reported once


def log(present, dropped, rejected, loss) -> Log:
    flags = [np.array(flag, bool) for flag in (present, dropped, rejected)]
    ids = np.broadcast_to(np.arange(flags[0].shape[1]) * 10, flags[0].shape)
    return Log(ids, *flags, {"loss": np.float32(loss)}, {}, {})


LOGS = [
    # One slot is dropped, one rejected, one empty; the last round of the call did not run.
    log(
        [[1, 1], [1, 0], [1, 1]],
        [[0, 1], [0, 0], [0, 0]],
        [[0, 0], [1, 0], [1, 0]],
        [[1, 64], [64, 64], [64, 64]],
    ),
    log([[1], [1], [1]], [[0]] * 3, [[0]] * 3, [[2], [6], [64]]),
]


def test_training_metrics_of_the_clients_that_arrived():
    honest = np.zeros(11, bool)
    pending = summaries.gather({}, LOGS, 2, honest)
    assert pending == {"loss": (9.0, 3)}
    assert summaries.means(pending) == {"train_loss": 3.0}
    assert summaries.gather({"loss": [9.0, 3]}, LOGS[1:], 1, honest) == {"loss": (11.0, 4)}
    assert pending == {"loss": (9.0, 3)}
    is_attacker = np.arange(11) == 0  # whose losses are 1, 2 and 6
    assert summaries.gather({}, LOGS, 2, is_attacker) == {"loss": (0.0, 0)}
    assert summaries.gather({}, LOGS, 2, ~is_attacker) == pending
    assert summaries.means({"loss": (0.0, 0)}) == {"train_loss": None}
    assert summaries.means({"loss": (np.nan, 2)}) == {"train_loss": None}


def test_a_training_metric_of_some_groups_is_a_mean_over_their_updates():
    (first, second) = (log([[1, 1]], [[0, 0]], [[0, 0]], [[2, 4]]) for _ in range(2))
    first = first._replace(metrics={"kl": np.float32([[4, 6]]), **first.metrics})
    pending = summaries.gather({}, [first, second], 1, np.zeros(11, bool))
    assert summaries.means(pending) == {"train_kl": 5.0, "train_loss": 3.0}


def test_training_metrics_do_not_depend_on_how_calls_divide_the_rounds():
    """The losses of three rounds are 2^24, 1 and 1: in float32, 2^24 + 1 is 2^24."""
    rounds = log([[1]] * 3, [[0]] * 3, [[0]] * 3, [[2**24], [1], [1]])
    honest, expected = np.zeros(1, bool), {"loss": (2.0**24 + 2, 3)}
    assert summaries.gather({}, [rounds], 3, honest) == expected
    pending = {}
    for r in range(3):
        call = jax.tree.map(lambda leaf, r=r: leaf[r : r + 1], rounds)
        pending = summaries.gather(pending, [call], 1, honest)
    assert pending == expected


def test_training_metrics_of_an_evaluation_are_those_since_the_last_one():
    recorder, score = Recorder(), scores([1], [1.0], [1])
    recorder.run.at = recorder.run.at._replace(pending={"loss": (6.0, 4)})
    assert recorder.evaluate(1, score)["train_loss"] == 1.5
    recorder.run.at = recorder.run.at._replace(
        pending=summaries.gather(recorder.run.at.pending, LOGS[1:], 1, np.zeros(11, bool))
    )
    assert recorder.evaluate(2, score)["train_loss"] == 2.0


def test_confusion_matrices_of_active_clients_with_a_finite_loss_are_added():
    """Client 1 is held out, and the loss of client 2 is not finite after local training."""
    matrices, active = np.arange(16).reshape(4, 2, 2), np.array([True, False, True, True])
    before = scores([1] * 4, [1.0] * 4, [2] * 4)._replace(confusion=matrices)
    after = before._replace(loss=np.array([1, 1, np.nan, 1]), confusion=10 * matrices)
    assert summaries.confusion(Evaluation(before, before, after), active) == {
        "classes": 2,
        "before": [[20, 23], [26, 29]],
        "after": [[120, 140], [160, 180]],
    }
    uncounted = before._replace(confusion=None)
    assert summaries.confusion(Evaluation(uncounted, uncounted, None), active) == {}


def test_rejected_uploads_are_reported_by_round():
    (line,) = summaries.rejections(LOGS, 10, 2)
    assert line.startswith("round 12: the update of client 0 was rejected")
    assert len(list(summaries.rejections(LOGS, 0, 3))) == 2
    assert list(summaries.rejections(LOGS, 0, 1)) == []


def test_a_client_without_a_defined_metric_counts_in_the_other_metrics():
    """Client 1 has a single class, so its AUROC is undefined and its accuracy counts."""
    task = select_metrics(classification(2), "classification", ["accuracy", "auroc"])
    histogram = np.zeros((3, 2, 4))
    histogram[0] = [[2, 0, 0, 0], [0, 2, 0, 0]]  # every pair in order: AUROC 1
    histogram[1, 1] = 4
    histogram[2] = [[0, 2, 0, 0], [2, 0, 0, 0]]  # no pair in order: AUROC 0
    accuracy, examples = np.array([4, 2, 0.0]), np.array([4, 4, 4])
    result = Scores({"accuracy": accuracy, "auroc": histogram}, np.ones(3), examples)
    means = summary(result, task)
    assert (means["accuracy_mean"], means["auroc_mean"], means["auroc_weighted"]) == (0.5, 0.5, 0.5)
    assert (means["auroc_worst10"], means["clients"], means["not_finite"]) == (0, 3, 0)
    rows = clients_csv.client_scores(Evaluation(result, result, None), task)
    assert [row["before_auroc"] for row in rows] == [1, None, 0]


def test_user_metrics_are_recorded_with_their_unit():
    task = classification(2)
    assert summaries.user_metrics(task) == {}
    task = task._replace(metrics=(ACCURACY._replace(name="mine", higher_is_better=False),))
    expected = {"custom_metrics": {"mine": {"unit": "%", "higher_is_better": False}}}
    assert summaries.user_metrics(task) == expected
    task = task._replace(metrics=(ACCURACY._replace(unit=""), SQUARED_ERROR))
    line = summaries.user_metrics(task) | {"before": {"accuracy_mean": 95.0}}
    assert line["custom_metrics"] == {"accuracy": {"unit": "", "higher_is_better": True}}
    assert numbers.format_score(numbers.metric_of([line]), 95.0) == "95"
