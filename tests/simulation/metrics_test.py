"""Means over clients and over examples, worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_pfl.core.algorithm import Federation, State
from fedjax_pfl.core.local_training import Scores
from fedjax_pfl.core.scores import ACCURACY
from fedjax_pfl.core.task import Task, classification, regression, select_metrics
from fedjax_pfl.runs import progress, run_state
from fedjax_pfl.simulation import ledger, metrics
from fedjax_pfl.simulation.records import Evaluation, Log

TASK = Task(None, (ACCURACY._replace(name="a"),), has_classes=True)


def scores(score, loss, examples, name="a") -> Scores:
    return Scores({name: np.float32(score)}, np.float32(loss), np.int32(examples))


def everyone(n: int) -> np.ndarray:
    return np.ones(n, bool)


def test_by_client_and_by_example():
    """Accuracies 1.0 on 10 examples and 0 on 90: half of the clients, a tenth of the examples."""
    got = metrics.summary(scores([10, 0], [5, 180], [10, 90]), everyone(2), TASK)
    assert got == {
        "a_mean": 0.5,
        "a_weighted": 0.1,
        "a_std": 0.5,
        "a_variance": 0.25,
        "a_worst10": 0.0,
        "loss": 1.25,  # (0.5 + 2) / 2, by client
        "clients": 2,
        "not_finite": 0,
    }


@pytest.mark.parametrize(("clients", "worst"), [(9, 0.0), (10, 0.0), (11, 0.05), (25, 0.1)])
def test_worst_tenth(clients: int, worst: float):
    """Accuracies 0, .1, .2, ... in a shuffled order; ceil(n/10) of them: 1, 1, 2 and 3."""
    order = np.random.default_rng(0).permutation(clients)
    got = metrics.summary(scores(order, order, [10] * clients), everyone(clients), TASK)
    assert got["a_worst10"] == pytest.approx(worst)
    assert got["a_mean"] == pytest.approx((clients - 1) / 20)
    assert got["a_std"] == pytest.approx(np.sqrt((clients**2 - 1) / 12) / 10)


def test_inactive_clients_and_those_without_examples_are_left_out():
    """Clients 1 (inactive) and 2 (no examples) would change every number."""
    active = np.array([True, False, True, True])
    got = metrics.summary(scores([1, 9, 0, 1], [2, 9, 0, 8], [2, 9, 0, 4]), active, TASK)
    wanted = {
        "a_mean": 0.375,
        "a_weighted": 2 / 6,
        "a_std": 0.125,
        "a_variance": 1 / 64,
        "a_worst10": 0.25,
        "loss": 1.5,
        "clients": 2,
        "not_finite": 0,
    }
    assert got == pytest.approx(wanted)
    assert metrics.summary(scores([0, 5], [0, 5], [0, 5]), np.array([True, False]), TASK) is None


def test_a_client_whose_evaluation_is_not_finite_is_counted_and_left_out():
    """A model of NaN is class 0 to an arg max: client 0 has .5 of its examples right by that."""
    lost = scores([1, 2, 3], [np.nan, 1, 2], [2, 2, 4])
    got = metrics.summary(lost, everyone(3), TASK)
    assert (got["a_mean"], got["a_weighted"], got["loss"]) == (0.875, 5 / 6, 0.5)
    assert (got["clients"], got["not_finite"]) == (2, 1)
    assert metrics.not_finite(lost, everyone(3), TASK) == [0]
    assert metrics.not_finite(lost, np.array([False, True, True]), TASK) == []
    rows = metrics.client_scores(Evaluation(lost, lost, None), TASK)
    assert (rows[0]["before_a"], rows[0]["before_loss"], rows[1]["before_a"]) == (None, None, 1.0)
    none = metrics.summary(scores([1], [np.inf], [2]), everyone(1), TASK)
    names = ["a_mean", "a_weighted", "a_std", "a_variance", "a_worst10", "loss"]
    assert none == {**dict.fromkeys(names), "clients": 0, "not_finite": 1}


def test_where_less_is_better_the_worst_are_the_largest():
    """Errors 1, 2, ..., 11 of a client each: the two worst are 10 and 11."""
    error = scores(np.arange(1, 12), np.arange(1, 12), [1] * 11, "squared_error")
    found = error._replace(metrics=error.metrics | {"rmse": error.metrics["squared_error"]})
    got = metrics.summary(found, everyone(11), regression())
    assert (got["squared_error_mean"], got["squared_error_worst10"]) == (6.0, 10.5)
    assert got["rmse_mean"] == pytest.approx(np.sqrt(np.arange(1, 12)).mean())
    assert next(iter(got)) == "squared_error_mean"  # by which readers know the first metric


def test_client_scores():
    before = scores([3, 0], [6, 0], [4, 0])
    rows = metrics.client_scores(Evaluation(before, before, scores([2, 0], [1, 0], [4, 0])), TASK)
    nothing = {"before_a": None, "before_loss": None, "after_a": None, "after_loss": None}
    assert rows == (
        {
            "test_examples": 4,
            "before_a": 0.75,
            "before_loss": 1.5,
            "after_a": 0.5,
            "after_loss": 0.25,
        },
        {"test_examples": 0, **nothing},
    )
    rows = metrics.client_scores(Evaluation(before, before, None), TASK)
    assert (rows[0]["before_a"], rows[0]["after_a"], rows[0]["after_loss"]) == (0.75, None, None)


def test_scores_of_the_best_evaluation_stay_until_there_is_a_better_one():
    def rows(before, after):
        return [{"before_a": before, "before_loss": 1.0, "after_a": after}]

    def best(found):
        return [(row["best_before_a"], row["best_after_a"]) for row in found]

    none = metrics.add_best(rows(0.5, None), (), False, TASK)  # there are no validation examples
    assert best(none) == [(None, None)]
    first = metrics.add_best(rows(0.5, 0.6), none, True, TASK)
    second = metrics.add_best(rows(0.9, 0.8), first, False, TASK)
    assert best(first) == best(second) == [(0.5, 0.6)]
    assert (second[0]["before_a"], second[0]["before_loss"]) == (0.9, 1.0)
    assert best(metrics.add_best(rows(0.7, 0.8), second, True, TASK)) == [(0.7, 0.8)]
    saved_earlier = [{"before_a": 0.5}]  # by a version that did not know of them
    assert best(metrics.add_best(rows(0.7, 0.8), saved_earlier, False, TASK)) == [(None, None)]


NOTHING = State((), (), ())


def member_and_program(task=TASK):
    phase = SimpleNamespace(
        federation=SimpleNamespace(active=everyone(1)),
        config=SimpleNamespace(algorithm="fedavg"),
        inputs=SimpleNamespace(evaluated=None),
    )
    built = SimpleNamespace(phases=[phase, phase], federation=SimpleNamespace(task=task))
    return built, run_state.SweepRun("", None, {}, at=run_state.Position(ledger=ledger.empty(1)))


def test_a_phase_does_not_take_over_the_best_of_the_one_before():
    """Its first score is not a number, so that it has no best round yet."""
    built, one = member_and_program()
    good, unknown = (scores([value], [1.0], [4]) for value in (3, np.nan))
    run_state.record_evaluation(built, one, Evaluation(good, good, None), NOTHING, {})
    assert one.at.clients[0]["best_before_a"] == 0.75
    one.at = one.at._replace(phase=1, best_round=None, best_score=None)
    run_state.record_evaluation(built, one, Evaluation(unknown, unknown, None), NOTHING, {})
    assert (one.at.best_round, one.at.clients[0]["best_before_a"]) == (None, None)


def best_round(task, values, losses, name):
    built, one = member_and_program(task)
    for t, (value, loss) in enumerate(zip(values, losses, strict=True), 1):
        one.at = one.at._replace(round=t)
        part = scores([value], [loss], [1], name)
        if task is not TASK:
            part = part._replace(metrics=part.metrics | {"rmse": part.metrics[name]})
        run_state.record_evaluation(built, one, Evaluation(part, part, None), NOTHING, {})
    return one.at.best_round


def test_the_best_round_is_the_best_and_finite():
    assert best_round(TASK, [0.5, 0.9, 0.7], [1, 1, 1], "a") == 2
    assert best_round(TASK, [0.5, 0.9, 0.7], [1, np.nan, 1], "a") == 3  # class 0, by chance
    assert best_round(TASK, [0.5], [np.inf], "a") is None
    assert best_round(regression(), [5, 2, 3], [5, 2, 3], "squared_error") == 2


def test_a_round_in_which_one_client_is_not_finite_is_never_the_best():
    """The mean over the others would be higher than before."""
    phase = SimpleNamespace(
        federation=SimpleNamespace(active=everyone(2)),
        config=SimpleNamespace(algorithm="fedavg"),
        inputs=SimpleNamespace(evaluated=None),
    )
    built = SimpleNamespace(phases=[phase], federation=SimpleNamespace(task=TASK))
    one = run_state.SweepRun("", None, {}, at=run_state.Position(ledger=ledger.empty(2)))
    whole, part = scores([2, 4], [1, 1], [4, 4]), scores([0, 4], [np.nan, 1], [4, 4])
    for t, found in enumerate([whole, part], 1):
        one.at = one.at._replace(round=t)
        line = run_state.record_evaluation(built, one, Evaluation(found, found, None), NOTHING, {})
    assert line["validation"]["a_mean"] == 1.0
    assert one.at.best_round == 1
    said = list(progress.not_finite(built, one, Evaluation(part, part, None)))
    (line,) = said
    assert line.startswith("round 2: the evaluation of client 0 is not finite")
    assert not list(progress.not_finite(built, one, Evaluation(part, part, None)))  # once


def test_client_table():
    federation = Federation(np.array([7, 8]), (5,), 3, np.array([True, False]), np.array([0, 1]))
    book = ledger.Ledger({}, {}, [1, 2], [3, 4], [5, 6], [7, 8], [9, 10])
    first, second = metrics.client_table(federation, [{"a": 1}, {"a": 2}], book)
    assert first == {
        "client": 0,
        "active": 1,
        "group": 0,
        "train_examples": 7,
        "a": 1,
        "bytes_down": 1,
        "bytes_up": 3,
        "visits": 5,
        "dropped": 7,
        "rejected": 9,
    }
    assert list(second.values()) == [1, 0, 1, 8, 2, 2, 4, 6, 8, 10]
    named = federation._replace(owners=("Aix", "Bern"))
    assert [row["owner"] for row in metrics.client_table(named, [{}, {}], book)] == ["Aix", "Bern"]


def log(present, dropped, rejected, loss) -> Log:
    flags = [np.array(flag, bool) for flag in (present, dropped, rejected)]
    ids = np.broadcast_to(np.arange(flags[0].shape[1]) * 10, flags[0].shape)
    return Log(ids, *flags, {"loss": np.float32(loss)}, {}, {})


LOGS = [
    # one slot dropped, one rejected, one empty; the last round of the call did not run
    log(
        [[1, 1], [1, 0], [1, 1]],
        [[0, 1], [0, 0], [0, 0]],
        [[0, 0], [1, 0], [1, 0]],
        [[1, 64], [64, 64], [64, 64]],
    ),
    log([[1], [1], [1]], [[0]] * 3, [[0]] * 3, [[2], [6], [64]]),
]


def test_training_metrics_of_those_that_arrived():
    pending = metrics.gather(({}, 0), LOGS, 2)
    assert pending == ({"loss": 9.0}, 3)
    assert metrics.means(pending) == {"train_loss": 3.0}
    again = metrics.gather(pending, LOGS[1:], 1)
    assert again == ({"loss": 11.0}, 4)
    assert pending == ({"loss": 9.0}, 3)
    assert metrics.means(({"loss": 0.0}, 0)) == {"train_loss": None}
    assert metrics.means(({"loss": np.nan}, 2)) == {"train_loss": None}


def test_a_line_for_each_rejected_upload():
    """Rounds are counted from 1; those that did not run say nothing."""
    (line,) = metrics.rejections(LOGS, 10, 2)
    assert line.startswith("round 12: the update of client 0 was rejected")
    assert len(list(metrics.rejections(LOGS, 0, 3))) == 2
    assert list(metrics.rejections(LOGS, 0, 1)) == []


def test_a_metric_that_a_client_does_not_define_is_left_out_alone():
    """Client 1 has one class only: no AUROC, and an accuracy that counts."""
    task = select_metrics(classification(2), "classification", ["accuracy", "auroc"])
    histogram = np.zeros((3, 2, 4))
    histogram[0] = [[2, 0, 0, 0], [0, 2, 0, 0]]  # all in order: 1
    histogram[1, 1] = 4
    histogram[2] = [[0, 2, 0, 0], [2, 0, 0, 0]]  # none: 0
    found = Scores(
        {"accuracy": np.array([4, 2, 0.0]), "auroc": histogram}, np.ones(3), np.array([4, 4, 4])
    )
    got = metrics.summary(found, everyone(3), task)
    assert (got["accuracy_mean"], got["auroc_mean"], got["auroc_weighted"]) == (0.5, 0.5, 0.5)
    assert (got["auroc_worst10"], got["clients"], got["not_finite"]) == (0, 3, 0)
    rows = metrics.client_scores(Evaluation(found, found, None), task)
    assert [row["before_auroc"] for row in rows] == [1, None, 0]
    assert metrics.user_metrics(task) == {}
    mine = task._replace(metrics=(ACCURACY._replace(name="mine", higher_is_better=False),))
    assert metrics.user_metrics(mine) == {
        "own_metrics": {"mine": {"unit": "%", "higher_is_better": False}}
    }
