"""Losses and metrics, compared with hand-computed numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.metrics import METRICS
from fedjax_pfl.core.task import classification, regression

LN3 = np.log(3.0)


def labels(*values):
    return jnp.asarray(np.array(values, np.int32))


def numbers(*values):
    return jnp.asarray(np.array(values, np.float32))


def test_cross_entropy():
    """Softmax of (0, ln 3) is (1/4, 3/4)."""
    task = classification()
    outputs = numbers([0, LN3], [0, LN3], [7, 7])
    loss = task.loss(outputs, labels(0, 1, 1), None)
    np.testing.assert_allclose(loss, np.log([4, 4 / 3, 2]), rtol=1e-6)
    (metric,) = task.metrics
    score = metric.update(outputs, labels(0, 1, 0), None)
    np.testing.assert_array_equal(score, [0, 1, 1])
    assert (loss.dtype, score.dtype, metric.name) == (jnp.float32, jnp.float32, "accuracy")
    assert (metric.unit, metric.higher_is_better, task.has_classes) == ("%", True, True)
    outputs = numbers([1e4, -1e4]).astype(jnp.bfloat16)
    loss = task.loss(outputs, labels(1), None)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [2 * float(outputs[0, 0])], rtol=1e-6)


def test_unused_classes_have_probability_zero():
    """The largest output is unused: the argmax and the normaliser ignore it."""
    task, classes = classification(), jnp.asarray([False, True, True])
    outputs, y = numbers([50, 0, LN3], [50, 2, 1]), labels(2, 1)
    np.testing.assert_array_equal(task.metrics[0].update(outputs, y, classes), [1, 1])
    np.testing.assert_array_equal(task.metrics[0].update(outputs, y, None), [0, 0])
    expected = [np.log(4 / 3), np.log1p(np.exp(-1))]
    np.testing.assert_allclose(task.loss(outputs, y, classes), expected, rtol=1e-5)


@pytest.mark.parametrize("classes", [(True, True, False), (False, True, False)])
def test_gradients_with_unused_classes(classes):
    """Used classes get softmax − one-hot, unused ones exactly 0."""
    outputs, y = numbers([300, -250, LN3], [-300, 1, 80]), labels(1, 1)
    opened = jnp.asarray(classes)
    gradient = jax.grad(lambda z: jnp.sum(classification().loss(z, y, opened)))(outputs)
    logits = np.where(classes, np.asarray(outputs, np.float64), -np.inf)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    expected = powers / powers.sum(1, keepdims=True) - np.eye(3)[np.asarray(y)]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert not np.asarray(gradient)[:, ~np.array(classes)].any()


def test_regression():
    """Losses are (1² + 2²)/2 and (3² + 4²)/2."""
    task = regression()
    outputs, y = numbers([1, 2], [0, 0]), numbers([0, 0], [3, -4])
    np.testing.assert_array_equal(task.loss(outputs, y, None), [2.5, 12.5])
    gradient = jax.grad(lambda z: jnp.sum(task.loss(z, y, None)))(outputs)
    np.testing.assert_array_equal(gradient, outputs - y)
    error, root = task.metrics
    assert (error.name, root.name) == ("squared_error", "rmse")
    assert (error.higher_is_better, root.higher_is_better, task.has_classes) == (False,) * 3
    one_target = (numbers([1], [3]), numbers([0], [0]))
    np.testing.assert_array_equal(task.loss(*one_target, None), [1, 9])


def test_metrics_by_name():
    for task in (classification(), regression()):
        assert [METRICS[metric.name] for metric in task.metrics] == list(task.metrics)
    assert all(re.fullmatch("[A-Za-z0-9_]+", name) for name in METRICS)
