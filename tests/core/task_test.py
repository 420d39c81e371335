"""Losses and scores, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    score = task.score(outputs, labels(0, 1, 0), None)
    np.testing.assert_array_equal(score, [0, 1, 1])
    assert (loss.dtype, score.dtype, task.name) == (jnp.float32, jnp.float32, "accuracy")


def test_large_outputs_and_half_precision():
    outputs = numbers([1e4, -1e4]).astype(jnp.bfloat16)
    loss = classification().loss(outputs, labels(1), None)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [2 * float(outputs[0, 0])], rtol=1e-6)


def test_closed_classes_do_not_exist():
    """The largest output is closed: neither the arg max nor the normaliser sees it."""
    task, classes = classification(), jnp.asarray([False, True, True])
    outputs, y = numbers([50, 0, LN3], [50, 2, 1]), labels(2, 1)
    np.testing.assert_array_equal(task.score(outputs, y, classes), [1, 1])
    np.testing.assert_array_equal(task.score(outputs, y, None), [0, 0])
    expected = [np.log(4 / 3), np.log1p(np.exp(-1))]
    np.testing.assert_allclose(task.loss(outputs, y, classes), expected, rtol=1e-6)


@pytest.mark.parametrize("classes", [(True, True, False), (False, True, False)])
def test_gradients_with_closed_classes(classes):
    """Open ones get softmax − one-hot, closed ones exactly nothing."""
    outputs, y = numbers([300, -250, LN3], [-300, 1, 80]), labels(1, 1)
    opened = jnp.asarray(classes)
    got = jax.grad(lambda z: jnp.sum(classification().loss(z, y, opened)))(outputs)
    logits = np.where(classes, np.asarray(outputs, np.float64), -np.inf)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    wanted = powers / powers.sum(1, keepdims=True) - np.eye(3)[np.asarray(y)]
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert not np.asarray(got)[:, ~np.array(classes)].any()


def test_regression():
    """½(1² + 2²) and ½(3² + 4²)."""
    task = regression()
    outputs, y = numbers([1, 2], [0, 0]), numbers([0, 0], [3, -4])
    np.testing.assert_array_equal(task.loss(outputs, y, None), [2.5, 12.5])
    np.testing.assert_array_equal(task.score(outputs, y, None), [-2.5, -12.5])
    assert task.name == "negative_loss"
    gradient = jax.grad(lambda z: jnp.sum(task.loss(z, y, None)))(outputs)
    np.testing.assert_array_equal(gradient, outputs - y)
