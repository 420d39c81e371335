import inspect
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import load, owners, partitions
from fedjax_pfl.data.partition import partition
from fedjax_pfl.data.partitions import PARTITIONS
from fedjax_pfl.data.pool import Pool
from tests.commands import message

CIFAR10 = np.full(10, 6000)
DIGITS = np.array([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
# The superclass of every class of CIFAR-100, in the official order.
# fmt: off
COARSE = np.array([
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13,
    15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4,
    17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13,
    15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
])
# fmt: on
CIFAR100 = Pool(np.full(100, 600), 100, COARSE)
BY_LABEL = [name for name in PARTITIONS if name not in owners.BY_OWNER]


def rng(seed=0):
    return np.random.default_rng(seed)


def calls(function):
    """Returns what a function returns, and the number of calls in it, a measure of its work."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, count


def refusal(name, pool, **options):
    return message(lambda: PARTITIONS[name](pool, rng(), **options))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BY_LABEL), st.integers(0, 99), st.integers(1, 6), st.booleans())
def test_counts_never_exceed_the_pool(name, seed, clients, uneven):
    available = rng(seed).integers(60, 90, 6) if uneven else np.full(6, 80)
    small = {"examples": 24} if "examples" in partitions.partition_settings(name) else {}
    small |= {"domains": 1} if name == "domains" else {}
    pool = Pool(available, clients, np.array([0, 0, 1, 1, 2, 2]))
    counts = PARTITIONS[name](pool, rng(seed), **small)
    assert counts.shape == (clients, 6)
    assert (counts >= 0).all()
    assert (counts.sum(0) <= available).all()
    np.testing.assert_array_equal(counts, PARTITIONS[name](pool, rng(seed), **small))


@pytest.mark.parametrize("name", [n for n in BY_LABEL if n not in ("iid", "domains", "listed")])
def test_partitions_depend_on_the_seed(name):
    first, second = (PARTITIONS[name](CIFAR100, rng(seed)) for seed in (0, 1))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("name", BY_LABEL)
def test_calls_grow_at_most_linearly_with_the_clients(name):
    small = {"classes": 120, "dominant": 120, "listed": 2}
    options = {"examples": small[name]} if name in small else {}
    few, many = (
        calls(lambda n=n: PARTITIONS[name](CIFAR100._replace(clients=n), rng(), **options))[1]
        for n in (50, 500)
    )
    assert many < 12 * few  # at most 10 when it was written


def test_listed_by_hand():
    lists = ((0, 1, 2), (2, 5))
    counts = partitions.listed(Pool(CIFAR10, 3), rng(), classes=lists, examples=7)
    expected = np.zeros((3, 10), int)
    expected[0, :3] = expected[2, :3] = (3, 2, 2)
    expected[1, [2, 5]] = (4, 3)
    np.testing.assert_array_equal(counts, expected)


def test_iid_gives_equal_counts_of_each_class():
    counts = partitions.iid(Pool(CIFAR10, 20), rng())
    np.testing.assert_array_equal(counts, np.full((20, 10), 300))
    counts = partitions.iid(Pool(CIFAR10, 20), rng(), examples=100)
    np.testing.assert_array_equal(counts, np.full((20, 10), 10))


def test_classes_by_hand():
    counts = partitions.classes(Pool(CIFAR10, 10), rng())  # as in pFedLA's paper
    np.testing.assert_array_equal(np.sort(counts, 1), [[0] * 6 + [150] * 4] * 10)
    counts = partitions.classes(Pool(CIFAR10, 3), rng(), per_client=4, examples=10)
    np.testing.assert_array_equal(np.sort(counts, 1)[:, -4:], [[2, 2, 3, 3]] * 3)
    # 8 slots of 5 examples; the classes have exactly 3 + 2 + 2 + 1 slots.
    small = Pool(np.array([15, 14, 10, 9]), 4)
    counts = partitions.classes(small, rng(), per_client=2, examples=10)
    np.testing.assert_array_equal(counts.sum(0), [15, 10, 10, 5])


def test_classes_says_what_fits():
    counts = partitions.classes(Pool(DIGITS, 10), rng(), examples=160)
    np.testing.assert_array_equal(np.sort(counts, 1)[:, -4:], 40)
    # 43 examples fit four times into each class of 172 or more: ten classes hold the 40 slots.
    line = refusal("classes", Pool(DIGITS, 10))
    assert line.endswith("the largest `examples` that fits is 172")
    partitions.classes(Pool(DIGITS, 10), rng(), examples=172)
    # 1,797 examples, four each: 449 clients.
    line = refusal("classes", Pool(DIGITS, 500))
    assert re.search(r"600 examples .* 1,797 .* at most 449 clients$", line)
    partitions.classes(Pool(DIGITS, 449), rng(), examples=4)


def test_dominant_counts_by_hand():
    # 8 rare classes and 2 of weight 10: low = floor(600/28) = 21, high = (600 - 168)/2 = 216.
    counts = partitions.dominant(Pool(CIFAR10, 10), rng())
    np.testing.assert_array_equal(np.sort(counts, 1), [[21] * 8 + [216] * 2] * 10)
    _, _, size = refusal("dominant", Pool(DIGITS, 10)).partition(
        "the largest `examples` that fits is "
    )
    size = int(size)
    partitions.dominant(Pool(DIGITS, 10), rng(), examples=size)
    assert size >= 150
    # 8 rare classes and 2 of weight 10: one example of each rare class needs 28.
    line = refusal("dominant", Pool(DIGITS, 10), examples=27)
    assert "examples=27 leaves no example of a rare class" in line
    assert "use at least 28" in line
    assert partitions.dominant(Pool(DIGITS, 10), rng(), examples=28).min() == 1


def test_shares_of_a_class_sum_to_one():
    counts = partitions.shares(Pool(CIFAR10, 10), rng())
    np.testing.assert_array_equal((counts > 0).sum(1), 2)
    np.testing.assert_array_equal((counts > 0).sum(0), 2)
    np.testing.assert_array_equal(counts.sum(0), CIFAR10)
    used = counts[counts > 0] / 6000
    assert used.min() >= 0.4  # 0.4 / (0.4 + 0.6)
    assert used.max() <= 0.6


def test_shares_with_a_spare_slot_lose_its_share():
    counts = partitions.shares(Pool(CIFAR10, 10), rng(), spare_slot=True)
    used, left = counts[counts > 0] / 6000, 1 - counts.sum(0) / 6000
    for share in (used, left):  # one of three slots: from 0.4 / (0.4 + 0.6 + 0.6)
        assert share.min() >= 0.4 / 1.6 - 1e-3
        assert share.max() <= 0.6 / 1.4 + 1e-3


def test_dirichlet_uses_all_examples_and_meets_the_minimum():
    counts = partitions.dirichlet(Pool(CIFAR10, 100), rng(), alpha=0.1, minimum=10)
    np.testing.assert_array_equal(counts.sum(0), CIFAR10)
    assert counts.sum(1).min() >= 10
    even = partitions.dirichlet(Pool(CIFAR10, 10), rng(), alpha=1e6)
    np.testing.assert_allclose(even, 600, atol=10)
    assert "no sample gave each" in refusal("dirichlet", Pool(DIGITS, 100), alpha=0.01)
    assert "the largest `minimum` is 3" in refusal("dirichlet", Pool(DIGITS, 500))


HOSTILE = {  # counts of classes, and clients
    "one class": ([50], 5),
    "as many clients as examples": ([20, 20], 40),
    "empty classes": ([0, 50, 0, 50], 10),
    "many clients": ([30] * 62, 400),
}


@pytest.mark.slow("draws many partitions")
@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_classes", "clusters", "pachinko"])
@pytest.mark.parametrize("case", HOSTILE)
def test_partitions_by_dirichlet_end_with_a_valid_partition_or_one_line(name, case):
    available, clients = np.array(HOSTILE[case][0]), HOSTILE[case][1]
    pool = Pool(available, clients, np.zeros(len(available), int))
    defaults = partitions.partition_settings(name)
    small = {"clusters": 1} if name == "clusters" else {}
    for alpha in (1e-320, 1e-6, 0.1, 1e6, 1e100):
        for least in (0, 1) if "minimum" in defaults else (None,):
            options = {"alpha": alpha, **small, **({} if least is None else {"minimum": least})}
            options |= {"beta": alpha} if "beta" in defaults else {}

            def sample(options=options):
                try:
                    return PARTITIONS[name](pool, rng(), **options)
                except UsageError:
                    return None

            counts, count = calls(sample)
            assert count < 100_000  # at most 21,000 when it was written
            if counts is None:
                refusal(name, pool, **options)
                continue
            assert counts.min() >= 0
            assert (counts.sum(0) <= available).all()
            assert counts.sum(1).min() >= (least or 0)


def test_dirichlet_classes_of_unequal_sizes():
    """Checks counts p_ic / Σ_j p_jc, with p_i sampled with the alpha of client i."""
    pool = Pool(CIFAR10, 100, held_out=10)
    counts = partitions.dirichlet_classes(pool, rng(), novel_alpha=1e6, equal=False)
    np.testing.assert_array_equal(counts.sum(0), CIFAR10)
    generator = rng()
    p = np.stack([generator.dirichlet(np.full(10, 0.1 if i < 90 else 1e6)) for i in range(100)])
    np.testing.assert_allclose(counts, p / p.sum(0) * CIFAR10, atol=1)
    assert np.ptp(counts[90:], 0).max() <= 1
    line = refusal("dirichlet_classes", pool, examples=5, equal=False)
    assert "uses all examples" in line


def test_dirichlet_classes_of_equal_sizes_with_novel_clients():
    pool = Pool(CIFAR10, 100, held_out=10)
    counts = partitions.dirichlet_classes(pool, rng(), novel_alpha=1e6, examples=100)
    np.testing.assert_array_equal(counts.sum(1), 100)
    assert counts[:90].max(1).mean() > 50
    assert (counts[90:].max(1) < 30).all()
    assert "the largest `examples` is 600" in refusal("dirichlet_classes", pool, examples=601)


def test_shards_by_hand():
    # Ten examples in four shards: 0-1, 2-4, 5-6, 7-9 of [0]*4 + [1]*6.
    counts = partitions.shards(Pool(np.array([4, 6]), 4), rng(), per_client=1)
    assert sorted(map(tuple, counts.tolist())) == [(0, 2), (0, 3), (2, 0), (2, 1)]
    counts = partitions.shards(Pool(CIFAR10, 100), rng())
    assert ((counts > 0).sum(1) <= 2).all()
    np.testing.assert_array_equal(counts.sum(1), 600)


def test_clusters_share_proportions_within_a_cluster():
    counts = partitions.clusters(Pool(CIFAR10, 80), rng())
    np.testing.assert_array_equal(counts.sum(0), CIFAR10)
    # Columns of two classes are correlated only if the classes are in one cluster.
    same_cluster = np.corrcoef(counts.T) > 0.9
    assert sorted(same_cluster.sum(0)) == [3] * 6 + [4] * 4


def test_pachinko_uses_every_example_once():
    counts = partitions.pachinko(CIFAR100, rng())
    np.testing.assert_array_equal(counts.sum(1), 600)
    np.testing.assert_array_equal(counts.sum(0), 600)
    few = partitions.pachinko(CIFAR100, rng(), examples=100)
    by_superclass = np.stack([few[:, t == COARSE].sum(1) for t in range(20)], 1)
    # Dir(0.4) over 20: E[sum of squares] = (0.4 + 1) / (20 * 0.4 + 1) = 0.156; sampling adds 0.01.
    concentration = ((by_superclass / 100) ** 2).sum(1).mean()
    assert 0.12 < concentration < 0.21


def test_pachinko_keeps_the_weight_of_a_superclass_with_an_empty_class():
    """Both superclasses are equally likely; only one of the two classes of the first is left."""
    pool = Pool(np.array([0, 1000, 1000]), 1, np.array([0, 0, 1]))
    counts = partitions.pachinko(pool, rng(), alpha=1e6, beta=1e6, examples=1000)
    np.testing.assert_allclose(counts, [[0, 500, 500]], atol=70)


def test_coarse_gives_whole_superclasses():
    counts = partitions.coarse(CIFAR100, rng())
    np.testing.assert_array_equal(counts.sum(0), 600)
    np.testing.assert_array_equal(np.sort(counts, 1)[:, -5:], 120)
    assert all(len(set(COARSE[row > 0])) == 1 for row in counts)


def test_domains_by_hand_and_for_cifar100():
    counts = partitions.domains(CIFAR100._replace(clients=20), rng())
    np.testing.assert_array_equal(counts.sum(1), 1500)
    assert set(COARSE[counts[0] > 0]) == {5, 6}
    assert set(COARSE[counts[19] > 0]) == {8, 11}
    np.testing.assert_array_equal((counts > 0).sum(1), 10)
    counts = partitions.domains(Pool(np.array([4, 4, 4]), 4), rng(), domains=2)
    np.testing.assert_array_equal(counts, [[2, 2, 0], [2, 2, 0], [0, 0, 2], [0, 0, 2]])
    counts = partitions.domains(Pool(np.array([4, 4, 4]), 2), rng(), classes=((2, 0), (1,)))
    np.testing.assert_array_equal(counts, [[4, 0, 4], [0, 4, 0]])


def test_natural_leaves_out_small_owners():
    owner_of = np.array([0, 0, 2, 3, 3, 3, 4, 4])
    client = owners.natural(owner_of, 3, rng(), minimum=2)
    np.testing.assert_array_equal(client, [0, -1, -1, 1, 2])
    np.testing.assert_array_equal(owners.natural(owner_of, 4, rng()), [0, -1, 1, 2, 3])


def test_settings_can_be_keyword_arguments():
    """The public function passes on those that it does not have itself."""
    parameters = set(inspect.signature(partition).parameters)
    for name in partitions.PARTITIONS:
        assert parameters.isdisjoint(partitions.partition_settings(name)), name
    images = load("synthetic", shape=(2,), classes=4, examples=80)
    data = partition(images, "domains", clients=4, classes=((0, 1), (2, 3)))
    assert data.federation.outputs == 2


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("classes", {"per_client": 11}, "per_client=11 must lie between 1 and 10"),
        ("classes", {"examples": 3}, "use at least 4"),
        ("dominant", {"ratio": 0.5}, "ratio=0.5: use a finite number, 1 or more"),
        ("dominant", {"ratio": np.inf}, "ratio=inf: use a finite number"),
        ("dominant", {"dominant": 0}, "dominant=0"),
        ("shares", {"low": 0.0}, "0 < low"),
        ("dirichlet", {"alpha": np.inf}, "alpha=inf must be positive, at most 1e"),
        ("dirichlet_classes", {"alpha": -1.0}, "must be positive"),
        ("dirichlet_classes", {"alpha": 1e-300, "equal": False}, "some class to no client"),
        ("shards", {"per_client": 7000}, "from 1 to 6000"),
        ("clusters", {"clusters": 11}, "clusters=11"),
        ("pachinko", {}, "needs superclasses"),
        ("coarse", {}, "needs superclasses"),
        ("domains", {"domains": 11}, "domains=11"),
        ("domains", {"classes": ((1, 2), (2,))}, "has a class twice"),
        ("domains", {"classes": (0, 1)}, "domains.classes has 0; each item must"),
        ("domains", {"classes": "ab"}, "list the classes of each, as in"),
        ("classes", {"examples": 10**9}, "the largest `examples` that fits is 6000"),
        ("dirichlet", {"minimum": -1}, "must be at least 0"),
        ("clusters", {"minimum": -1}, "must be at least 0"),
        ("iid", {"examples": 6001}, "the largest `examples` is 6000"),
        ("listed", {"classes": ((0, 0),)}, "each item must list distinct classes from 0 to 9"),
        ("listed", {"classes": ((),)}, "each item must"),
        ("listed", {"classes": ((True,),)}, "each item must"),
        ("listed", {"classes": (("a",),)}, "has .'a',.; each item must"),
        ("listed", {"classes": ((0, 1, 2),), "examples": 2}, "use at least 3"),
        ("listed", {"classes": ((1,),), "examples": 5000}, "class 1 has 6,000"),
    ],
)
def test_invalid_settings_raise_one_line(name, options, line):
    assert re.search(line, refusal(name, Pool(CIFAR10, 10), **options))


def test_advice_is_possible():
    assert refusal("shards", Pool(DIGITS, 3000)).endswith("use at most 1797 clients")
    line = refusal("classes", Pool(np.array([9, 0, 9]), 2), per_client=3, examples=3)
    assert "only 2 classes have examples; use at most that for per" in line
    assert refusal("listed", Pool(DIGITS, 5000), examples=2).endswith("use fewer clients")


def test_natural_counts_eligible_owners_in_errors():
    owner_of = np.array([0, 1, 1])
    for clients, minimum, line in (
        (2, 2, "2 or more examples, and there are 1: use clients=1 or fewer, or minimum=1 or less"),
        (3, 1, "1 or more examples, and there are 2: use clients=2 or fewer"),
        (1, 9, "9 or more examples, and there are none: use minimum=2 or less"),
        (3, 9, "9 or more examples, and there are none: use a smaller minimum"),
    ):
        error = message(
            lambda c, m: owners.natural(owner_of, c, rng(), minimum=m), clients, minimum
        )
        assert error == f"{clients} clients need as many owners with {line}"


def test_partition_settings_are_read_from_signatures():
    assert partitions.partition_settings("classes") == {"per_client": 4, "examples": 600}
    assert partitions.partition_settings("natural") == {"minimum": 1}
