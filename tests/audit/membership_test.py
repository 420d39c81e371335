"""Tests of the scores of membership inference against counting and numbers by hand."""

import jax
import numpy as np
import pytest

from fedjax_pfl.audit.membership import (
    auc,
    class_distances,
    feature_function,
    non_members,
    split_distances,
    tpr_at_fpr,
)
from fedjax_pfl.audit.server_view import server_view, uploaded_means
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.core.task import regression
from fedjax_pfl.core.trees import row
from tests.audit.inversion_test import CTX, DATA, MLP, make_method, new_state

pytestmark = pytest.mark.slow("attacks on trained models")


def test_auc_is_the_mann_whitney_statistic():
    # Of six pairs, 1 and 2 lie below 3 and 5, and 4 lies below 5.
    assert auc(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0])) == 5 / 6
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 9, 40), rng.integers(2, 11, 30)  # many equal losses
    counts = [(m < o) + 0.5 * (m == o) for m in members for o in others]
    np.testing.assert_allclose(auc(members, others), np.mean(counts), rtol=1e-12)


def test_tpr_at_fpr_by_hand():
    others = np.arange(1.0, 101)  # at 2 %, the examples 1 and 2 lie below the threshold
    members = np.array([0.5, 1.5, 2.5, 3.0, 4.0])
    assert tpr_at_fpr(members, others, 0.02) == 3 / 5
    assert tpr_at_fpr(members, others, 0.01) == 2 / 5
    assert tpr_at_fpr(members, others[:20], 0.01) == 1 / 5  # none of 20 may lie below
    assert tpr_at_fpr(others, others, 0.29) == 0.29


def test_distances_to_the_mean_of_the_other_examples_by_hand():
    z = np.array([[0.0, 0], [5, 5], [2, 0], [4, 4]], np.float32)
    y = np.array([2, 7, 2, 2])
    # The others of class 2 have means (3, 2), (2, 2) and (1, 0); class 7 has no other.
    expected = [9 + 4, np.nan, 0 + 4, 9 + 16]
    np.testing.assert_allclose(class_distances(z, y, None), expected, rtol=1e-12)
    member_values, other_values = split_distances([(z[:2], y[:2]), (z[2:], y[2:])], None)
    assert (member_values.tolist(), other_values.tolist()) == ([13], [4, 25])


def test_distances_to_uploaded_means_by_hand():
    z, y = np.array([[0.0, 0], [5, 5]], np.float32), np.array([2, 0])
    means = np.array([[2.0, 1], [9, 9], [0, 3]], np.float32)
    np.testing.assert_allclose(class_distances(z, y, means), [9, 9 + 16], rtol=1e-12)


def test_features_without_knowledge_are_at_chance():
    """Each example is left out of its own mean, so members and others have equal distances."""
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(4000, 3)), np.arange(4000) % 400
    member_values, other_values = split_distances(
        [(z[:3000], y[:3000]), (z[3000:], y[3000:])], None
    )
    assert abs(auc(member_values, other_values) - 0.5) < 0.05  # 4.7 standard errors
    means = np.stack([z[:3000][y[:3000] == c].mean(0) for c in range(400)])
    member_values, other_values = split_distances(
        [(z[:3000], y[:3000]), (z[3000:], y[3000:])], means
    )
    assert auc(member_values, other_values) > 0.55  # each training example is part of its mean


def test_examples_of_other_classes_are_no_comparison():
    """Of a shared test set, example 3 is the only one of a class that client 0 trains on."""
    y = np.array([0, 0, 1, 0, 1, 2])
    splits = {"train": [[0, 1], [2, 2]], "test": [[4, 3, 5], [4, 3, 5]]}
    train, test = (
        Split(np.array(rows), np.array([len(r) for r in rows])) for rows in splits.values()
    )
    data = FederatedData(x=np.zeros((6, 1)), y=y, train=train, validation=train, test=test)
    facts = DATA.federation
    split = non_members(data, facts, 0)
    assert (split.rows.tolist(), int(split.size)) == ([3, 4, 5], 1)
    without_classes = facts._replace(task=regression(1))
    split = non_members(data, without_classes, 0)
    assert (split.rows.tolist(), int(split.size)) == ([4, 3, 5], 3)


@pytest.mark.parametrize(
    ("name", "has_body", "has_means"),
    [
        ("fedavg", True, False),
        ("fedper", True, False),
        ("keep_head", True, False),
        ("pfedfda", True, True),
        ("lg_fedavg", False, False),
        ("fedproto", False, True),
        ("fedtgp", False, True),
        ("fedgh", False, True),
        ("local", False, False),
        ("pefll", False, False),
    ],
)
def test_a_server_has_features_only_with_the_uploaded_body(name, has_body, has_means):
    method = make_method(name, MLP)
    state = new_state(method, 0.1)
    payload = method.send(state._replace(clients=()), CTX._replace(data=None))
    upload = method.train(payload, row(state.clients, 0), CTX).upload
    variables = dict(MLP.init(CTX.key, DATA.federation.examples()))
    body = server_view(method, payload, upload, variables).uploaded(variables, MLP.head)
    means = uploaded_means(upload, (3, 5))
    assert (body is not None, means is not None) == (has_body, has_means)
    if name in ("fedtgp", "fedproto"):
        np.testing.assert_array_equal(means, upload["prototypes"])
    elif has_means:
        np.testing.assert_array_equal(means, upload["means"])
    if has_body:
        fc1 = jax.device_get(upload["params"]["fc1"])
        z, y = feature_function(MLP)(body, CTX.data, CTX.data.validation)
        rows = np.asarray(CTX.data.validation.rows)[: int(CTX.data.validation.size)]
        x = np.asarray(CTX.data.x)[rows].reshape(len(rows), -1)
        expected = np.maximum(x @ fc1["kernel"] + fc1["bias"], 0)
        np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(y, np.asarray(CTX.data.y)[rows])
