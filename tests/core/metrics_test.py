"""Metrics summed over padded batches, compared with scikit-learn on the examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as oracle

from fedjax_pfl.core import metrics
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

RNG = np.random.default_rng(3)
N, SIZE = 23, 8


def summed(metric, outputs, y):
    """Returns a metric that is summed over batches of eight; the last one is padded."""
    total, examples = None, len(y)
    for start in range(0, examples, SIZE):
        rows = np.arange(start, start + SIZE)
        real = rows < examples
        rows = np.where(real, rows, 0)
        terms = metric.update(jnp.asarray(outputs[rows]), jnp.asarray(y[rows]), None)

        def add(values, real=real):
            return np.sum(np.asarray(values, np.float64)[real], 0)

        part = jax.tree.map(add, terms)
        total = part if total is None else jax.tree.map(np.add, total, part)
    state = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), total)
    values = metric.finish(state, np.array([examples, examples], np.float64))
    assert values.shape == (2,)
    assert values[0] == values[1] or np.isnan(values).all()
    return float(values[0])


def metric_of(task, name):
    return {metric.name: metric for metric in (*task.metrics, *task.optional_metrics)}[name]


def test_classification_metrics():
    outputs = RNG.normal(size=(N, 5)).astype(np.float32)
    y = RNG.integers(0, 4, N).astype(np.int32)  # class 4 is predicted and does not occur
    predicted, task = outputs.argmax(1), classification(5)
    p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    for name, expected in (
        ("accuracy", oracle.accuracy_score(y, predicted)),
        ("balanced_accuracy", np.mean([np.mean(predicted[y == c] == c) for c in range(4)])),
        ("macro_f1", oracle.f1_score(y, predicted, average="macro")),
        ("perplexity", np.exp(oracle.log_loss(y, p, labels=range(5)))),
    ):
        np.testing.assert_allclose(summed(metric_of(task, name), outputs, y), expected, rtol=1e-5)
    outputs = outputs[:, :4]  # scikit-learn warns of classes that do not occur
    balanced = summed(metric_of(task, "balanced_accuracy"), outputs, y)
    expected = oracle.balanced_accuracy_score(y, outputs.argmax(1))
    np.testing.assert_allclose(balanced, expected, rtol=1e-6)


def test_confusion_matrix_counts_the_examples_of_the_mask():
    outputs = RNG.normal(size=(N, 5)).astype(np.float32)
    y, mask = RNG.integers(0, 4, N).astype(np.int32), RNG.integers(0, 2, N).astype(bool)
    for classes in (None, np.array([1, 1, 1, 0, 1], bool)):
        matrix = metrics.confusion_matrix(outputs, y, classes, mask)
        logits = outputs if classes is None else np.where(classes, outputs, -np.inf)
        predicted = logits.argmax(1)[mask]
        expected = oracle.confusion_matrix(y[mask], predicted, labels=range(5))
        np.testing.assert_array_equal(matrix, expected)


def test_auroc_of_two_classes():
    """The area is exact if all scores are in different bins; scores in one bin are ties."""
    y = RNG.integers(0, 2, N).astype(np.int32)
    scaled = RNG.permutation(np.linspace(-0.9, 0.9, N))  # s/(1 + |s|); bins are 1/256 wide
    score = scaled / (1 - np.abs(scaled))
    outputs = np.stack([0 * score, score], 1).astype(np.float32)
    area = metric_of(classification(2), "auroc")
    np.testing.assert_allclose(summed(area, outputs, y), oracle.roc_auc_score(y, score), rtol=1e-9)
    ties = outputs * np.float32(1e-4)
    assert summed(area, np.abs(ties), y) == 0.5
    rough = np.round(RNG.normal(size=N), 1)
    rough = np.stack([-rough, rough], 1).astype(np.float32)
    np.testing.assert_allclose(summed(area, rough, y), oracle.roc_auc_score(y, rough[:, 1]), 1e-9)
    assert np.isnan(summed(area, outputs, np.ones(N, np.int32)))
    for score in (np.inf, 3e38):
        extreme = np.array([[score, -score], [-score, score]], np.float32)
        assert summed(area, extreme, np.int32([0, 1])) == 1


def test_multilabel_metrics():
    outputs = RNG.normal(size=(N, 4)).astype(np.float32)
    y = RNG.integers(0, 2, (N, 4)).astype(bool)
    y[:, 3] = False  # a label that does not occur
    predicted, task = outputs > 0, multilabel(4)
    assert summed(metric_of(task, "accuracy"), outputs, y) == pytest.approx(np.mean(predicted == y))
    expected = oracle.f1_score(y, predicted, average="macro", zero_division=0)
    assert summed(metric_of(task, "macro_f1"), outputs, y) == pytest.approx(expected)
    expected = np.mean([oracle.roc_auc_score(y[:, i], outputs[:, i]) for i in range(3)])
    assert summed(metric_of(task, "auroc"), outputs, y) == pytest.approx(expected, abs=0.01)
    p = 1 / (1 + np.exp(-outputs.astype(np.float64)))
    loss = -np.mean(np.where(y, np.log(p), np.log(1 - p)), 1)
    np.testing.assert_allclose(task.loss(jnp.asarray(outputs), jnp.asarray(y), None), loss, 1e-5)


def test_regression_metrics():
    y = RNG.normal(size=(N, 3)).astype(np.float32) * [1, 5, 0] + [0, 2, 7]
    y = y.astype(np.float32)
    outputs = (y + RNG.normal(size=y.shape)).astype(np.float32)
    task = regression(3)
    actual = {m.name: summed(m, outputs, y) for m in (*task.metrics, *task.optional_metrics)}
    error = oracle.mean_squared_error(y, outputs)
    np.testing.assert_allclose(
        [actual["squared_error"], actual["rmse"]], [error, error**0.5], rtol=1e-6
    )
    # The third target is constant and is left out.
    np.testing.assert_allclose(actual["r2"], oracle.r2_score(y[:, :2], outputs[:, :2]), rtol=1e-5)
    assert np.isnan(summed(metric_of(task, "r2"), outputs[:1], y[:1]))


def test_constant_targets_have_no_r2():
    """Rounding of float32 sums gives a constant target a variation; here of 200 batches."""
    r2, constants = metric_of(regression(1), "r2"), RNG.uniform(-10, 10, (1, 100))
    y = jnp.asarray(constants, jnp.float32)
    terms = jax.tree.map(lambda leaf: np.asarray(leaf)[0, :, None], r2.update(y + 1, y, None))
    total = jax.tree.map(np.zeros_like, terms)
    for _ in range(200):
        total = jax.tree.map(np.add, total, terms)  # in float32
    assert ((total.square - total.y**2 / 200) / total.square).max() > 1e-6
    assert np.isnan(r2.finish(total, np.full(100, 200))).all()


def test_token_metrics():
    """Positions without a label are ignored."""
    outputs = RNG.normal(size=(N, 6, 5)).astype(np.float32)
    y = RNG.integers(0, 5, (N, 6)).astype(np.int32)
    lengths = RNG.integers(0, 7, N)
    lengths[:2] = 0, 6
    labelled = np.arange(6) < lengths[:, None]
    y = np.where(labelled, y, -1).astype(np.int32)
    task, predicted = tokens(5), outputs.argmax(-1)
    assert [metric.name for metric in task.metrics] == ["accuracy", "perplexity"]
    expected = oracle.accuracy_score(y[labelled], predicted[labelled])
    assert summed(task.metrics[0], outputs, y) == pytest.approx(expected)
    p = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    nll = -np.log(np.take_along_axis(p, np.maximum(y, 0)[..., None], -1)[..., 0])
    expected = np.exp(nll[labelled].mean())
    np.testing.assert_allclose(summed(task.metrics[1], outputs, y), expected, rtol=1e-5)
    loss = np.asarray(task.loss(jnp.asarray(outputs), jnp.asarray(y), None))
    means = [nll[i][labelled[i]].mean() if labelled[i].any() else 0.0 for i in range(N)]
    np.testing.assert_allclose(loss, means, rtol=1e-4)
    changed = np.where(labelled[..., None], outputs, 99.0).astype(np.float32)
    np.testing.assert_array_equal(task.loss(jnp.asarray(changed), jnp.asarray(y), None), loss)
    assert np.isnan(summed(task.metrics[0], outputs[:1], y[:1]))


def test_select_metrics_keeps_the_order_of_names():
    task = select_metrics(classification(2), "classification", ["auroc", "accuracy", "auroc"])
    assert [metric.name for metric in task.metrics] == ["auroc", "accuracy"]
    assert select_metrics(regression(1), "regression", []) == regression(1)._replace(
        loss=metrics.squared_error
    )
    for task, name, wrong, line in (
        (classification(3), "classification", "auroc", "auroc is for two classes"),
        (classification(3), "classification", "acuracy", "did you mean accuracy?"),
        (regression(1), "regression", "x", "there are squared_error, rmse, r2"),
    ):
        with pytest.raises(UsageError, match=line.replace("?", r"\?")):
            select_metrics(task, name, [wrong])


def test_labels_decide_the_task():
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


RMSE_OF_ALL = metrics.RMSE._replace(finish=lambda sums, examples: sums.sum() / examples.sum())
RMSE_THAT_FAILS = metrics.RMSE._replace(finish=lambda sums, examples: 1 / 0)


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (Task(bad_loss, (metrics.RMSE,)), r"mine: loss gives \[\[\]\] for 2 examples"),
        (Task(good_loss, ()), "mine has no metric"),
        (Task(good_loss, (metrics.RMSE._replace(name="a b"),)), "mine has a metric called 'a b'"),
        (Task(good_loss, (metrics.RMSE._replace(name="class"),)), "a metric called 'class'; use"),
        (Task(good_loss, (metrics.RMSE._replace(name="2nd"),)), "a metric called '2nd'; use"),
        (Task(good_loss, (metrics.RMSE, metrics.RMSE)), "mine has two metrics called 'rmse'"),
        (Task(good_loss, (metrics.RMSE._replace(update=bad_loss),)), "mine: rmse gives"),
        (Task(good_loss, (RMSE_OF_ALL,)), r"mine: finish of rmse gives \[\] for 2 clients"),
        (Task(good_loss, (RMSE_THAT_FAILS,)), "mine: finish of rmse fails for 2 clients: division"),
        (Task(metrics.cross_entropy, (metrics.RMSE,)), r"mine: loss fails for outputs \[2, 3\]"),
    ],
)
def test_invalid_user_tasks(task, line):
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    check_task("fine", Task(good_loss, (metrics.RMSE,)), shape, shape)
    with pytest.raises(UsageError, match=line):
        check_task("mine", task, shape, shape)
