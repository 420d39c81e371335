"""Every score, summed over padded batches, against scikit-learn on the examples themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as oracle

from fedjax_pfl.core import scores
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.task import (
    Task,
    check_labels,
    check_task,
    classification,
    infer_task,
    multilabel,
    regression,
    select_metrics,
    tokens,
)

DRAW = np.random.default_rng(3)
N, SIZE = 23, 8


def summed(metric, outputs, y):
    """Over batches of eight, of which the last is padded with rubbish, for one client of two."""
    total, examples = None, len(y)
    for start in range(0, examples, SIZE):
        rows = np.arange(start, start + SIZE)
        real = rows < examples
        rows = np.where(real, rows, 0)
        each = metric.update(jnp.asarray(outputs[rows]), jnp.asarray(y[rows]), None)

        def add(values, real=real):
            return np.sum(np.asarray(values, np.float64)[real], 0)

        part = jax.tree.map(add, each)
        total = part if total is None else jax.tree.map(np.add, total, part)
    state = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), total)
    found = metric.finish(state, np.array([examples, examples], np.float64))
    assert found.shape == (2,)
    assert found[0] == found[1] or np.isnan(found).all()
    return float(found[0])


def metric_of(task, name):
    return {metric.name: metric for metric in (*task.metrics, *task.optional_metrics)}[name]


def test_of_classes():
    outputs = DRAW.normal(size=(N, 5)).astype(np.float32)
    y = DRAW.integers(0, 4, N).astype(np.int32)  # class 4 does not occur, and is predicted
    guess, task = outputs.argmax(1), classification(5)
    p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    for name, wanted in (
        ("accuracy", oracle.accuracy_score(y, guess)),
        ("balanced_accuracy", np.mean([np.mean(guess[y == c] == c) for c in range(4)])),
        ("macro_f1", oracle.f1_score(y, guess, average="macro")),
        ("perplexity", np.exp(oracle.log_loss(y, p, labels=range(5)))),
    ):
        np.testing.assert_allclose(summed(metric_of(task, name), outputs, y), wanted, rtol=1e-5)
    seen = outputs[:, :4]  # where scikit-learn has no warning of classes that do not occur
    got = summed(metric_of(task, "balanced_accuracy"), seen, y)
    np.testing.assert_allclose(got, oracle.balanced_accuracy_score(y, seen.argmax(1)), rtol=1e-6)


def test_area_of_two_classes():
    """Scores apart by more than a bin give the area itself; those in one bin are ties."""
    y = DRAW.integers(0, 2, N).astype(np.int32)
    apart = DRAW.permutation(np.linspace(-0.9, 0.9, N))  # in s/(1 + |s|), where bins are 1/256 wide
    score = apart / (1 - np.abs(apart))
    outputs = np.stack([0 * score, score], 1).astype(np.float32)
    area = metric_of(classification(2), "auroc")
    np.testing.assert_allclose(summed(area, outputs, y), oracle.roc_auc_score(y, score), rtol=1e-9)
    together = outputs * np.float32(1e-4)
    assert summed(area, np.abs(together), y) == 0.5
    # In general: what two classes share of bins is all that it can be wrong by.
    rough = np.round(DRAW.normal(size=N), 1)
    rough = np.stack([-rough, rough], 1).astype(np.float32)
    np.testing.assert_allclose(summed(area, rough, y), oracle.roc_auc_score(y, rough[:, 1]), 1e-9)
    assert np.isnan(summed(area, outputs, np.ones(N, np.int32)))
    for far in (np.inf, 3e38):
        assert (
            summed(area, np.array([[far, -far], [-far, far]], np.float32), y[[0, 0]] * 0 + [0, 1])
            == 1
        )


def test_of_labels():
    outputs = DRAW.normal(size=(N, 4)).astype(np.float32)
    y = DRAW.integers(0, 2, (N, 4)).astype(bool)
    y[:, 3] = False  # nobody has it
    guess, task = outputs > 0, multilabel(4)
    assert summed(metric_of(task, "accuracy"), outputs, y) == pytest.approx(np.mean(guess == y))
    wanted = oracle.f1_score(y, guess, average="macro", zero_division=0)
    assert summed(metric_of(task, "macro_f1"), outputs, y) == pytest.approx(wanted)
    wanted = np.mean([oracle.roc_auc_score(y[:, i], outputs[:, i]) for i in range(3)])
    assert summed(metric_of(task, "auroc"), outputs, y) == pytest.approx(wanted, abs=0.01)
    p = 1 / (1 + np.exp(-outputs.astype(np.float64)))
    loss = -np.mean(np.where(y, np.log(p), np.log(1 - p)), 1)
    np.testing.assert_allclose(task.loss(jnp.asarray(outputs), jnp.asarray(y), None), loss, 1e-5)


def test_of_targets():
    y = DRAW.normal(size=(N, 3)).astype(np.float32) * [1, 5, 0] + [0, 2, 7]
    y = y.astype(np.float32)
    outputs = (y + DRAW.normal(size=y.shape)).astype(np.float32)
    task = regression(3)
    got = {m.name: summed(m, outputs, y) for m in (*task.metrics, *task.optional_metrics)}
    error = oracle.mean_squared_error(y, outputs)
    np.testing.assert_allclose([got["squared_error"], got["rmse"]], [error, error**0.5], rtol=1e-6)
    # The third target is the same in all examples, and explains nothing.
    np.testing.assert_allclose(got["r2"], oracle.r2_score(y[:, :2], outputs[:, :2]), rtol=1e-5)
    assert np.isnan(summed(metric_of(task, "r2"), outputs[:1], y[:1]))


def test_of_tokens():
    """Sums over positions that have a label, whatever stands in the others."""
    outputs = DRAW.normal(size=(N, 6, 5)).astype(np.float32)
    y = DRAW.integers(0, 5, (N, 6)).astype(np.int32)
    lengths = DRAW.integers(0, 7, N)
    lengths[:2] = 0, 6
    there = np.arange(6) < lengths[:, None]
    y = np.where(there, y, -1).astype(np.int32)
    task, guess = tokens(5), outputs.argmax(-1)
    assert [metric.name for metric in task.metrics] == ["accuracy", "perplexity"]
    wanted = oracle.accuracy_score(y[there], guess[there])
    assert summed(task.metrics[0], outputs, y) == pytest.approx(wanted)
    p = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    nll = -np.log(np.take_along_axis(p, np.maximum(y, 0)[..., None], -1)[..., 0])
    wanted = np.exp(nll[there].mean())
    np.testing.assert_allclose(summed(task.metrics[1], outputs, y), wanted, rtol=1e-5)
    loss = np.asarray(task.loss(jnp.asarray(outputs), jnp.asarray(y), None))
    each = [nll[i][there[i]].mean() if there[i].any() else 0.0 for i in range(N)]
    np.testing.assert_allclose(loss, each, rtol=1e-4)
    other = np.where(there[..., None], outputs, 99.0).astype(np.float32)
    np.testing.assert_array_equal(task.loss(jnp.asarray(other), jnp.asarray(y), None), loss)
    assert np.isnan(summed(task.metrics[0], outputs[:1], y[:1]))


def test_metrics_that_are_named_come_in_their_order():
    task = select_metrics(classification(2), "classification", ["auroc", "accuracy", "auroc"])
    assert [metric.name for metric in task.metrics] == ["auroc", "accuracy"]
    assert select_metrics(regression(1), "regression", []) == regression(1)._replace(
        loss=scores.squared_error
    )
    for task, name, wrong, line in (
        (classification(3), "classification", "auroc", "auroc is for two classes"),
        (classification(3), "classification", "acuracy", "did you mean accuracy?"),
        (regression(1), "regression", "x", "there are squared_error, rmse, r2"),
    ):
        with pytest.raises(UsageError, match=line.replace("?", r"\?")):
            select_metrics(task, name, [wrong])


def test_labels_say_their_task():
    for y, name in (
        (np.zeros(3, np.int32), "classification"),
        (np.zeros((3, 1), np.float32), "regression"),
        (np.zeros((3, 4), np.int32), "tokens"),
        (np.zeros((3, 4), bool), "multilabel"),
    ):
        assert infer_task(y) == name
        check_labels(name, y)
        check_labels("mine", y)
    with pytest.raises(UsageError, match=r"task tokens learns .* and y is bool .* task=multilabel"):
        check_labels("tokens", np.zeros((3, 4), bool))


def bad_loss(outputs, y, classes):
    return jnp.mean(jnp.square(outputs - y))


def good_loss(outputs, y, classes):
    return jnp.mean(jnp.square(outputs - y), -1)


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (Task(bad_loss, (scores.RMSE,)), r"mine: loss gives \[\[\]\] for 2 examples"),
        (Task(good_loss, ()), "mine has no metric"),
        (Task(good_loss, (scores.RMSE._replace(name="a b"),)), "mine has a metric called 'a b'"),
        (Task(good_loss, (scores.RMSE._replace(update=bad_loss),)), "mine: rmse gives"),
        (Task(scores.cross_entropy, (scores.RMSE,)), r"mine: loss fails for outputs \[2, 3\]"),
    ],
)
def test_tasks_of_ones_own_that_do_not_keep_the_form(task, line):
    seen = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    check_task("fine", Task(good_loss, (scores.RMSE,)), seen, seen)
    with pytest.raises(UsageError, match=line):
        check_task("mine", task, seen, seen)
