"""Tests of the rows of clients.csv against numbers worked out by hand."""

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.simulation import clients_csv, ledger
from fedjax_pfl.simulation.records import Evaluation
from tests.simulation.summaries_test import TASK, scores


def test_client_scores():
    before, after = scores([3, 0], [6, 0], [4, 0]), scores([2, 0], [1, 0], [4, 0])
    columns = ("test_examples", "before_a", "before_loss", "after_a", "after_loss")
    rows = clients_csv.client_scores(Evaluation(before, before, after), TASK)
    assert rows == (
        dict(zip(columns, (4, 0.75, 1.5, 0.5, 0.25), strict=True)),
        {**dict.fromkeys(columns), "test_examples": 0},
    )
    rows = clients_csv.client_scores(Evaluation(before, before, None), TASK)
    assert (rows[0]["before_a"], rows[0]["after_a"], rows[0]["after_loss"]) == (0.75, None, None)


def test_columns_of_the_evaluated_clients():
    """Client 1 is not evaluated."""
    evaluated, before = np.array([0, 2]), scores([3, 1, 2], [6, 1, 2], [4, 2, 4])
    ages = {"age": np.array([5.0, 6.0, 7.0])}
    evaluation = Evaluation(before, before, None)
    scored = clients_csv.client_scores(evaluation, TASK, evaluated, ages)
    assert [(row["before_a"], row["age"]) for row in scored] == [(0.75, 5), (0.5, 7)]
    federation = Federation(np.array([7, 8, 9]), (5,), 3, np.ones(3, bool), np.zeros(3, int))
    rows = clients_csv.client_rows(federation, scored, ledger.empty(3), evaluated)
    assert [row["client"] for row in rows] == [0, 1, 2]
    assert [row["age"] for row in rows] == [5, None, 7]
    assert [row["test_examples"] for row in rows] == [4, None, 4]


def test_best_scores_are_replaced_by_better_ones_only():
    def rows(before, after):
        return [{"before_a": before, "before_loss": 1.0, "after_a": after}]

    def best(clients):
        return [(row["best_before_a"], row["best_after_a"]) for row in clients]

    unvalidated = clients_csv.add_best(rows(0.5, None), (), False, TASK)
    assert best(unvalidated) == [(None, None)]
    first = clients_csv.add_best(rows(0.5, 0.6), unvalidated, True, TASK)
    second = clients_csv.add_best(rows(0.9, 0.8), first, False, TASK)
    assert best(first) == best(second) == [(0.5, 0.6)]
    assert (second[0]["before_a"], second[0]["before_loss"]) == (0.9, 1.0)
    assert best(clients_csv.add_best(rows(0.7, 0.8), second, True, TASK)) == [(0.7, 0.8)]
    without_best = [{"before_a": 0.5}]  # saved by an older version
    assert best(clients_csv.add_best(rows(0.7, 0.8), without_best, False, TASK)) == [(None, None)]


def test_client_rows():
    federation = Federation(np.array([7, 8]), (5,), 3, np.array([True, False]), np.array([0, 1]))
    book = ledger.Ledger({}, {}, [1, 2], [3, 4], [5, 6], [7, 8], [9, 10])
    first, second = clients_csv.client_rows(federation, [{"a": 1}, {"a": 2}], book)
    assert first == {
        "client": 0,
        "active": 1,
        "group": 0,
        "train_examples": 7,
        "a": 1,
        "bytes_down": 1,
        "bytes_up": 3,
        "client_updates": 5,
        "dropped": 7,
        "rejected": 9,
    }
    assert list(second.values()) == [1, 0, 1, 8, 2, 2, 4, 6, 8, 10]
    with_owners = clients_csv.client_rows(federation._replace(owners=("Aix", "B")), [{}, {}], book)
    assert [row["owner"] for row in with_owners] == ["Aix", "B"]
