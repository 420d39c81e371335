import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.data import apportion

totals = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(np.array)
quick = settings(max_examples=60, deadline=None)


def test_cut_rounds_boundaries_and_loses_nothing():
    shares = np.array([[1 / 3, 0.25], [1 / 3, 0.25], [1 / 3, 0.25]])
    # Boundaries 3.33, 6.67, 10 and 2.5, 5, 7.5: the last quarter of the second class is unused.
    np.testing.assert_array_equal(
        apportion.cut(shares, np.array([10, 10])), [[3, 2], [4, 3], [3, 3]]
    )


def test_same_shares_are_exact():
    counts = np.array([[2, 0], [4, 3]])
    got = apportion.same_shares(counts, np.array([6, 6]), np.array([3, 5]))
    np.testing.assert_array_equal(got, [[1, 0], [2, 2]])  # 3 of 6 give half of 5, rounded down


def test_proportional_gives_the_largest_remainders():
    np.testing.assert_array_equal(apportion.proportional(np.array([1, 1, 2]), 9), [2, 2, 5])
    np.testing.assert_array_equal(apportion.proportional(np.array([5, 3, 0]), 5), [3, 2, 0])


def test_round_robin_by_hand():
    # Positions 0..4 are class 0, 5..6 class 1; client 0 holds positions 0, 3, 6.
    got = apportion.round_robin(np.array([5, 2]), 3)
    np.testing.assert_array_equal(got, [[2, 1], [2, 0], [1, 1]])


@quick
@given(totals, st.integers(1, 9))
def test_round_robin_is_even(total, clients):
    counts = apportion.round_robin(total, clients)
    np.testing.assert_array_equal(counts.sum(0), total)
    assert np.ptp(counts.sum(1)) <= 1
    assert np.ptp(counts, 0).max() <= 1


@quick
@given(st.data())
def test_deal_gives_each_example_to_one_client_and_the_right_number(data):
    total = data.draw(totals)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    clients = data.draw(st.integers(1, 5))
    shares = rng.dirichlet(np.ones(clients + 1), len(total)).T[:clients]
    counts = apportion.cut(shares, total)
    assert (counts.sum(0) <= total).all()
    labels = rng.permutation(np.repeat(np.arange(len(total)), total))
    client = apportion.deal(labels, counts, rng)
    for i in range(clients):
        held = np.bincount(labels[client == i], minlength=len(total))
        np.testing.assert_array_equal(held, counts[i])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7).map(np.array),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_pick_succeeds_whenever_it_can(capacity, clients, picks, seed):
    if not apportion.fits(capacity, clients, picks):
        return
    chosen = apportion.pick(capacity, clients, picks, np.random.default_rng(seed))
    assert chosen.shape == (clients, picks)
    assert all(len(set(row)) == picks for row in chosen)
    assert (np.bincount(chosen.ravel(), minlength=len(capacity)) <= capacity).all()


def test_pick_is_uniform_where_nothing_is_scarce():
    chosen = apportion.pick(np.full(5, 4000), 4000, 2, np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(chosen.ravel()) / 4000, 0.4, atol=0.03)


@pytest.mark.parametrize(("clients", "picks"), [(10, 2), (7, 3)])
def test_least_used_is_balanced(clients, picks):
    chosen = apportion.least_used(10, clients, picks, np.random.default_rng(0))
    used = np.bincount(chosen.ravel(), minlength=10)
    assert np.ptp(used) <= 1
    assert all(len(set(row)) == picks for row in chosen)


def test_draw_takes_what_is_left_and_no_more():
    remaining = np.array([3, 1, 50])
    rng = np.random.default_rng(0)
    drawn = apportion.draw(remaining, 40, lambda alive: np.array([0.5, 0.5, 0.0]), rng)
    np.testing.assert_array_equal(drawn, [3, 1, 36])
