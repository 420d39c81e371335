"""Tests of the scores of membership inference against counting and numbers by hand."""

import numpy as np

from fedjax_pfl.audit.membership import auc, tpr_at_fpr


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
