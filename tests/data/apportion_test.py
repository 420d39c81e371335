import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.data import apportion

totals = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(np.array)
quick = settings(max_examples=60, deadline=None)


def test_round_shares_rounds_cumulative_sums():
    shares = np.array([[1 / 3, 0.25], [1 / 3, 0.25], [1 / 3, 0.25]])
    # Sums 3.33, 6.67, 10 and 2.5, 5, 7.5: the last quarter of the second class is unused.
    counts = apportion.round_shares(shares, np.array([10, 10]))
    np.testing.assert_array_equal(counts, [[3, 2], [4, 3], [3, 3]])


def test_scale_counts_is_exact():
    counts = np.array([[2, 0], [4, 3]])
    scaled = apportion.scale_counts(counts, np.array([6, 6]), np.array([3, 5]))
    # Halves of 2, 6 and 3 times 5, the last one rounded after an offset of 3/6.
    np.testing.assert_array_equal(scaled, [[1, 0], [2, 3]])


def test_scaled_counts_of_a_client_are_even_over_its_classes():
    """200 clients with 2 or 3 of 500 examples of each of 100 classes share 100 for testing."""
    counts = apportion.round_robin(np.full(100, 500), 200)
    scaled = apportion.scale_counts(counts, np.full(100, 500), np.full(100, 100))
    np.testing.assert_array_equal(scaled.sum(0), 100)
    assert (scaled >= 0).all()
    assert 48 <= scaled.sum(1).min() <= scaled.sum(1).max() <= 52


def test_largest_remainder():
    np.testing.assert_array_equal(apportion.largest_remainder(np.array([1, 1, 2]), 9), [2, 2, 5])
    np.testing.assert_array_equal(apportion.largest_remainder(np.array([5, 3, 0]), 5), [3, 2, 0])


def test_round_robin_by_hand():
    # Positions 0..4 are class 0, 5..6 class 1; client 0 holds positions 0, 3, 6.
    counts = apportion.round_robin(np.array([5, 2]), 3)
    np.testing.assert_array_equal(counts, [[2, 1], [2, 0], [1, 1]])


@quick
@given(totals, st.integers(1, 9))
def test_round_robin_is_even(total, clients):
    counts = apportion.round_robin(total, clients)
    np.testing.assert_array_equal(counts.sum(0), total)
    assert np.ptp(counts.sum(1)) <= 1
    assert np.ptp(counts, 0).max() <= 1


@quick
@given(st.data())
def test_assign_examples_realises_counts(data):
    total = data.draw(totals)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    clients = data.draw(st.integers(1, 5))
    shares = rng.dirichlet(np.ones(clients + 1), len(total)).T[:clients]
    counts = apportion.round_shares(shares, total)
    assert (counts.sum(0) <= total).all()
    labels = rng.permutation(np.repeat(np.arange(len(total)), total))
    client = apportion.assign_examples(labels, counts, rng)
    for i in range(clients):
        assigned = np.bincount(labels[client == i], minlength=len(total))
        np.testing.assert_array_equal(assigned, counts[i])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7).map(np.array),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_pick_classes_succeeds_if_can_pick(capacity, clients, picks, seed):
    if not apportion.can_pick(capacity, clients, picks):
        return
    classes = apportion.pick_classes(capacity, clients, picks, np.random.default_rng(seed))
    assert classes.shape == (clients, picks)
    assert all(len(set(row)) == picks for row in classes)
    assert (np.bincount(classes.ravel(), minlength=len(capacity)) <= capacity).all()


def test_pick_classes_is_uniform_without_scarce_classes():
    classes = apportion.pick_classes(np.full(5, 4000), 4000, 2, np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(classes.ravel()) / 4000, 0.4, atol=0.03)


def test_every_client_may_pick_a_scarce_class():
    """One of four clients picks class 0; the others have to pick class 1."""
    capacity = np.array([1, 3])
    picks = [
        apportion.pick_classes(capacity, 4, 1, np.random.default_rng(seed))[:, 0]
        for seed in range(400)
    ]
    np.testing.assert_allclose(np.equal(picks, 0).mean(0), 0.25, atol=0.09)


def test_pick_least_used_is_balanced():
    for clients, picks in ((10, 2), (7, 3)):
        classes = apportion.pick_least_used(10, clients, picks, np.random.default_rng(0))
        assert np.ptp(np.bincount(classes.ravel(), minlength=10)) <= 1
        assert all(len(set(row)) == picks for row in classes)


def test_sample_counts_replaces_classes_without_examples():
    rng = np.random.default_rng(0)
    counts = apportion.sample_counts(
        np.array([3, 1, 50]), 40, lambda _: np.array([0.5, 0.5, 0.0]), rng
    )
    np.testing.assert_array_equal(counts, [3, 1, 36])


def test_examples_of_a_class_go_to_its_clients_in_random_order():
    """The oracle searches all labels for each class."""
    rng, oracle = np.random.default_rng(0), np.random.default_rng(0)
    labels = np.random.default_rng(1).integers(0, 40, 300)
    total = np.bincount(labels, minlength=41)
    counts = np.stack([total // 2, total // 3])
    client = apportion.assign_examples(labels, counts, rng)
    for c in range(40):
        rows = oracle.permutation(np.flatnonzero(labels == c))
        want = [0] * counts[0, c] + [1] * counts[1, c]
        want += [-1] * (len(rows) - len(want))
        np.testing.assert_array_equal(client[rows], want)
