import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import PARTITIONS, arrays, client_data, federate, load, take
from fedjax_pfl.data.federate import portions
from tests.commands import message

DIGITS = load("digits")
SPLIT = load("synthetic", examples=1200, test_examples=600, shape=(2,), classes=10)
NAMES = ("train", "validation", "test")


def numbered(n=120, classes=4, n_test=0, **options):
    """Returns a dataset whose only feature is the number of the example."""
    x = np.arange(n + n_test, dtype=np.float32)[:, None]
    y = np.arange(n + n_test) % classes
    test = (x[n:], y[n:]) if n_test else (None, None)
    return arrays(x[:n], y[:n], *test, outputs=classes, **options)


def numbers_of(data, i, name):
    """Returns the numbers of the examples of client i in a split."""
    split = getattr(data, name)
    return data.x[split.rows[i, : split.size[i]], 0].astype(int)


def all_numbers(data):
    """Returns the numbers of all examples that clients hold."""
    return np.concatenate(
        [numbers_of(data, i, n) for i in range(len(data.train.size)) for n in NAMES]
    )


def test_pooled_splits_every_client_by_the_fractions():
    fractions = {"test_fraction": 0.3, "validation_fraction": 0.1}
    data, federation = federate(
        DIGITS, "classes", clients=10, settings={"examples": 160}, **fractions
    )
    np.testing.assert_array_equal(data.test.size, 48)
    np.testing.assert_array_equal(data.validation.size, 16)
    np.testing.assert_array_equal(data.train.size, 96)
    assert data.x.shape == (1600, 8, 8, 1)  # unused examples are left out
    assert data.x.dtype == np.uint8
    assert {str(array.dtype) for s in data[2:5] for array in (s.rows, s.size)} == {"int32"}
    counts = sum(portions(data, 10))
    np.testing.assert_array_equal((counts > 0).sum(1), 4)
    np.testing.assert_array_equal(counts.max(1), 40)
    np.testing.assert_array_equal(federation.counts, 96)
    assert federation.input_shape == (8, 8, 1)
    assert federation.outputs == 10
    assert federation.active.all()
    assert not federation.groups.any()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["iid", "classes", "dirichlet", "shares", "shards", "clusters"]),
    st.sampled_from(["pooled", "official"]),
    st.integers(2, 6),
    st.integers(0, 99),
)
def test_no_example_is_assigned_twice(name, split, clients, seed):
    options = {"clients": clients, "seed": seed, "split": split, "validation_fraction": 0.1}
    options["settings"] = {"examples": 40} if name == "classes" else {}
    dataset = numbered(400, n_test=200)
    try:
        data, federation = federate(dataset, name, **options)
    except UsageError:  # a client may be without test examples
        assert split == "official"
        return
    numbers = all_numbers(data)
    assert len(set(numbers)) == len(numbers) == len(data.x)
    classes = federation.class_counts.shape[1]
    assert (sum(p.sum(0) for p in portions(data, classes)) <= 150).all()
    for split_ in data[2:5]:
        padding = np.arange(split_.rows.shape[1]) >= split_.size[:, None]
        assert not split_.rows[padding].any()
    again, _ = federate(dataset, name, **options)
    jax.tree.map(np.testing.assert_array_equal, data, again)


def test_partition_depends_on_the_seed():
    first, second = (federate(numbered(), "iid", clients=4, seed=s)[0] for s in (0, 1))
    assert set(numbers_of(first, 0, "train")) != set(numbers_of(second, 0, "train"))


def test_clients_with_few_examples_are_trained_before_they_are_tested():
    for fraction in (0.01, 0.99):
        data, _ = federate(numbered(8), "iid", clients=4, test_fraction=fraction)
        np.testing.assert_array_equal(data.train.size, 1)
        np.testing.assert_array_equal(data.test.size, 1)
        assert data.validation.rows.shape == (4, 1)
    fractions = {"test_fraction": 0.4, "validation_fraction": 0.4}
    data, _ = federate(numbered(8), "iid", clients=4, **fractions)
    for split, size in ((data.train, 1), (data.validation, 0), (data.test, 1)):
        np.testing.assert_array_equal(split.size, size)
    # One of five clients with six examples has a test example.
    data, federation = federate(numbered(6, classes=1), "iid", clients=5)
    np.testing.assert_array_equal(federation.counts, 1)
    assert data.test.size.sum() == 1
    dataset = arrays(np.zeros((5, 1)), np.zeros(5, int), owners=np.array([1, 0, 0, 0, 0]))
    data, federation = federate(dataset, "natural", clients=2)
    np.testing.assert_array_equal(federation.counts, [3, 1])
    np.testing.assert_array_equal(data.test.size, [1, 0])
    dataset = numbered(6, n_test=1, classes=1)
    data, federation = federate(dataset, "iid", clients=3, split="official")
    assert sorted(data.test.size) == [0, 0, 1]
    np.testing.assert_array_equal(federation.counts, 2)


def test_official_keeps_shares_of_classes_in_every_split():
    data, federation = federate(
        SPLIT, "shares", clients=10, split="official", validation_examples=300
    )
    train = federation.class_counts
    for p, total in zip(portions(data, train.shape[1]), (900, 300, 600), strict=True):
        assert p.sum() == total  # no example is lost
        np.testing.assert_array_equal((p > 0).sum(1), 2)
        np.testing.assert_array_equal(p > 0, train > 0)
        shares = p / p.sum(0)
        np.testing.assert_allclose(shares, train / train.sum(0), atol=0.05)
    test_rows = {tuple(row) for row in SPLIT.x_test}
    for i in range(10):
        rows = data.x[data.test.rows[i, : data.test.size[i]]]
        assert {tuple(row) for row in rows} <= test_rows
    np.testing.assert_array_equal(federation.counts, train.sum(1))


def test_shared_gives_all_clients_the_same_test_set():
    split = {"split": "shared", "test_fraction": 0.1, "validation_fraction": 0.2}
    data, _ = federate(
        numbered(100), "classes", clients=3, settings={"per_client": 2, "examples": 16}, **split
    )
    np.testing.assert_array_equal(data.test.size, 10)
    np.testing.assert_array_equal(data.validation.size, 20)
    test, validation = set(numbers_of(data, 0, "test")), set(numbers_of(data, 0, "validation"))
    trained = [set(numbers_of(data, i, "train")) for i in range(3)]
    for i in range(3):
        assert set(numbers_of(data, i, "test")) == test
        assert set(numbers_of(data, i, "validation")) == validation
        assert not trained[i] & (test | validation)
    assert len(set.union(*trained)) == 48


def test_domains_share_outputs_and_have_separate_test_sets():
    two = {"clients": 4, "settings": {"domains": 2}}  # classes 0 1 2 and 3 4
    data, federation = federate(
        numbered(200, classes=5), "domains", **two, split="shared", test_fraction=0.2
    )
    assert federation.outputs == 3
    np.testing.assert_array_equal(data.label_map, [[0, 1, 2, 0, 1]] * 4)
    np.testing.assert_array_equal(data.classes, [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]])
    train, _, test = portions(data, 5)
    assert not test[:2, 3:].any()
    assert not test[2:, :3].any()
    tested = test[0] + test[2]
    assert tested.sum() == 40
    np.testing.assert_array_equal(train.sum(0) + tested, 40)


def test_permuted_labels_are_permutations_and_stored_labels_stay():
    unpermuted, _ = federate(DIGITS, "iid", clients=20)
    data, _ = federate(DIGITS, "iid", clients=20, permute_labels=True)
    np.testing.assert_array_equal(np.sort(data.label_map, 1), [np.arange(10)] * 20)
    assert data.label_map.dtype == np.int32
    assert len({tuple(row) for row in data.label_map}) == 20
    np.testing.assert_array_equal(data.y, unpermuted.y)
    jax.tree.map(np.testing.assert_array_equal, data.train, unpermuted.train)
    client = client_data(jax.tree.map(jnp.asarray, data), 3)
    batch = take(client, client.train.rows[:5], jnp.ones(5, bool))
    rows = data.train.rows[3, :5]
    np.testing.assert_array_equal(batch.y, data.label_map[3, data.y[rows]])
    np.testing.assert_allclose(batch.x, data.x[rows] * data.scale + data.shift, rtol=1e-6)


def test_permuted_domains_permute_within_a_domain():
    dataset, two = numbered(200, classes=6), {"clients": 6, "settings": {"domains": 2}}
    data, federation = federate(dataset, "domains", **two, permute_labels=True)
    assert federation.outputs == 3
    for i, row in enumerate(data.label_map):
        assert sorted(row[:3] if i < 3 else row[3:]) == [0, 1, 2]


def test_outputs_of_several_classes_have_no_name():
    dataset = numbered()._replace(metadata={"label": "kind", "classes": list("abcd")})
    for partition, permuted in (("iid", False), ("iid", True), ("domains", False)):
        settings = {"domains": 2} if partition == "domains" else {}
        options = {"settings": settings, "permute_labels": permuted}
        _, federation = federate(dataset, partition, clients=2, **options)
        names = {} if permuted or settings else {"classes": list("abcd")}
        assert federation.metadata == {"label": "kind", **names}


def owned():
    # Owner 0 has classes 0 and 1, owner 1 has 0 to 3, owner 2 has one example.
    x = np.arange(25, dtype=np.float32)[:, None]
    y = np.concatenate([np.arange(12) % 2, np.arange(12) % 4, [0]])
    mask = np.arange(4) < np.array([2, 4, 1])[:, None]
    owners = np.repeat([0, 1, 2], [12, 12, 1])
    return arrays(x, y, owners=owners, owner_classes=mask)


def test_natural_clients_have_the_classes_of_their_owners():
    two = {"clients": 2, "settings": {"minimum": 2}}
    data, _ = federate(owned(), "natural", **two, test_fraction=0.25)
    assert set(np.concatenate([numbers_of(data, 0, n) for n in NAMES])) == set(range(12))
    assert set(np.concatenate([numbers_of(data, 1, n) for n in NAMES])) == set(range(12, 24))
    np.testing.assert_array_equal(data.classes, [[1, 1, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(data.test.size, 3)
    mapped, _ = federate(owned(), "natural", **two, permute_labels=True, seed=1)
    assert set(mapped.label_map[0, :2]) == {0, 1}
    np.testing.assert_array_equal(mapped.label_map[0, 2:], [2, 3])


def test_labels_are_permuted_within_the_classes_of_an_owner():
    mask = np.array([[False, True, False, True], [True, False, True, False]])
    y = np.concatenate([np.tile([1, 3], 6), np.tile([0, 2], 6)])
    dataset = arrays(np.ones((24, 1)), y, owners=np.repeat([0, 1], 12), owner_classes=mask)
    data, _ = federate(dataset, "natural", clients=2, permute_labels=True)
    for row, classes in zip(data.label_map, mask, strict=True):
        np.testing.assert_array_equal(np.sort(row[classes]), np.flatnonzero(classes))
        np.testing.assert_array_equal(row[~classes], np.flatnonzero(~classes))


def test_natural_official_keeps_test_sets_of_owners():
    dataset = numbered(40, n_test=20, owners=np.arange(40) // 10, owners_test=np.arange(20) // 5)
    data, _ = federate(dataset, "natural", clients=4, split="official", validation_fraction=0.2)
    for i in range(4):
        assert set(numbers_of(data, i, "test")) == set(range(40 + 5 * i, 45 + 5 * i))
    numbers = np.concatenate([numbers_of(data, i, n) for i in range(4) for n in NAMES[:2]])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(40))
    assert data.validation.size.sum() == 8


@pytest.mark.parametrize("split", ["pooled", "official"])
def test_split_owners_divides_the_examples_of_each_owner(split):
    sizes, n_test = np.array([31, 7, 40, 2, 20]), 50
    owners, owners_test = np.repeat(np.arange(5), sizes), np.arange(n_test) % 5
    dataset = numbered(100, n_test=n_test, owners=owners, owners_test=owners_test)
    options = {"clients": 12, "settings": {"per_owner": 3}, "split": split, "test_fraction": 0.2}
    data, federation = federate(dataset, "split_owners", **options)
    owner = np.concatenate([owners, owners_test])
    held = [np.concatenate([numbers_of(data, i, n) for n in NAMES]) for i in range(12)]
    for client, numbers in enumerate(held):
        assert set(owner[numbers]) == {int(federation.owners[client])}
    sampled = [int(name) for name in federation.owners]
    assert sampled == sorted(sampled)
    assert sorted(set(sampled)) == [o for o in range(5) if sampled.count(o) == 3]
    # The parts are disjoint and cover the owner; the sizes of each part differ by at most one.
    expected = np.flatnonzero(np.isin(owner, sampled))
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), expected)
    counted = (data.train.size, data.test.size) if split == "official" else (list(map(len, held)),)
    for number in counted:
        assert np.ptp(np.reshape(number, (4, 3)), 1).max() <= 1
    again, _ = federate(dataset, "split_owners", **options)
    np.testing.assert_array_equal(all_numbers(again), all_numbers(data))
    other, _ = federate(dataset, "split_owners", **options, seed=1)
    assert not np.array_equal(all_numbers(other), all_numbers(data))


def test_split_owners_says_what_fits():
    def line(clients, **settings):
        dataset = numbered(9, classes=1, owners=np.array([0] * 6 + [1] * 3))
        options = {"clients": clients, "settings": settings}
        return message(lambda: federate(dataset, "split_owners", **options))

    assert "clients=3 is not a multiple of per_owner=2: use clients=4" in line(3)
    assert "per_owner=0 must be at least 1" in line(4, per_owner=0)
    assert line(4, minimum=2).endswith(
        "4 clients, 2 of each owner, need 2 owners with 4 or more examples, and there are 1: use "
        "clients=2 or fewer, or minimum=1 or less"
    )


def test_regression_is_partitioned_without_classes():
    y = np.arange(40, dtype=np.float64).reshape(20, 2)
    dataset = arrays(np.ones((20, 3)), y)
    data, federation = federate(dataset, "iid", clients=4)
    assert federation.outputs == 2
    assert data.y.dtype == np.float32
    np.testing.assert_array_equal(sum(portions(data, 1)), [[5]] * 4)
    assert "has no classes" in message(lambda: federate(dataset, "dirichlet", clients=4))
    assert "permuted" in message(lambda: federate(dataset, "iid", clients=4, permute_labels=True))


def test_novel_clients_and_groups():
    _, federation = federate(DIGITS, "iid", clients=10, held_out=2, groups=3)
    np.testing.assert_array_equal(federation.active, [True] * 8 + [False] * 2)
    np.testing.assert_array_equal(federation.groups, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"partition": "dirchlet"}, "did you mean dirichlet"),
        ({"split": "oficial"}, "did you mean official"),
        ({"settings": {"alpha": 1}}, "has no argument 'alpha'; it takes examples"),
        ({"partition": "classes", "settings": {"per_client": 11}}, "^partition classes: per_cl"),
        ({"settings": {"examples": 10.5}}, "iid.examples is 10.5; it must be of type int or None"),
        ({"settings": {"examples": True}}, "iid.examples is True; it must be of type int or None"),
        (
            {"partition": "classes", "settings": {"per_client": None}},
            "classes.per_client is None; it must be of type int",
        ),
        (
            {"partition": "dirichlet", "settings": {"alpha": float("nan")}},
            "dirichlet.alpha is nan; it must be of type float",
        ),
        (
            {"partition": "listed", "settings": {"classes": "01"}},
            "listed.classes is '01'; it must be of type tuple",
        ),
        ({"clients": 0}, "use at least 1"),
        ({"clients": 3.0}, "clients=3.0: use an integer"),
        ({"groups": "2"}, "groups='2': use an integer"),
        ({"seed": -1}, "seed=-1: use an integer, 0 or more"),
        ({"seed": 1.5}, "seed=1.5: use an integer, 0 or more"),
        (
            {"clients": 1797},
            "digits has 1,797 examples, .* 1,797 clients .* at most 1,796 clients$",
        ),
        ({"clients": 10**9, "split": "shared"}, "clients: use at most 1,438 clients$"),
        ({"settings": {"examples": 1}}, "client 0 and 9 others would have nothing to test on"),
        ({"partition": "pachinko"}, "^partition pachinko needs superclasses"),
        ({"held_out": 10}, "must leave one of 10 clients active"),
        ({"groups": 11}, "groups=11"),
        ({"split": "official"}, "no test set of its own"),
        ({"partition": "natural"}, "has no owners"),
        ({"test_fraction": 0.8, "validation_fraction": 0.2}, "leave something to train on"),
        ({"test_fraction": float("nan")}, "leave something to train on"),
        ({"test_fraction": "0.3"}, "test_fraction='0.3': use a number"),
        ({"split": "shared", "test_fraction": 0.0}, "nothing to test on with split=shared"),
        ({"split": "shared", "test_fraction": 1e-4}, "to test on: .* or a larger test_fraction"),
        ({"test_fraction": 0.0}, "test_fraction=0 leaves nothing to test on with split=pooled"),
        ({"split": "shared", "validation_examples": 5000}, "validation_examples .* 0 to 1437,"),
        ({"split": "shared", "validation_fraction": 0.79999}, "validation_fraction asks for 1438 "),
        ({"split": "shared", "validation_examples": 2.5}, "=2.5: use an integer"),
        ({"validation_examples": 50}, "is for split=official or shared"),
        (
            {"split": "shared", "validation_examples": 5, "validation_fraction": 0.1},
            "^validation_fraction and validation_examples are both set; choose one",
        ),
    ],
)
def test_invalid_requests_raise_one_line(options, line):
    options = {"partition": "iid", "clients": 10, **options}
    assert re.search(line, message(lambda: federate(DIGITS, options.pop("partition"), **options)))


def test_datasets_that_cannot_be_partitioned_are_refused():
    line = message(lambda: federate(numbered(1, classes=1), "iid", clients=2))
    assert "has 1 examples, too few for a client" in line
    line = message(lambda: federate(owned(), "natural", clients=2, split="shared"))
    assert "cannot share a test set" in line  # owners with different classes


def test_natural_clients_are_named_after_owners():
    def owners_of(owners, clients=3, **options):
        dataset = arrays(np.zeros((6, 1)), np.zeros(6, int), owners=owners)
        return federate(dataset, "natural", clients=clients, **options)[1].owners

    names = ["Cairo", "Bern", "Bern", "Aix", "Aix", "Cairo"]
    assert owners_of(names) == ("Aix", "Bern", "Cairo")
    two = owners_of(names, clients=2, seed=1)
    assert len(two) == 2
    assert two == tuple(sorted(two))
    assert owners_of([2, 1, 1, 0, 0, 2]) == ("0", "1", "2")
    # Large numbers are neither cut to 32 bits nor used as sizes.
    assert owners_of(np.array([0, 0, 2**32, 2**32, 7, 7])) == ("0", "7", "4294967296")
    assert federate(DIGITS, "iid", clients=2)[1].owners is None


def test_owners_of_both_sets_are_numbered_together():
    dataset = numbered(4, n_test=4, classes=1, owners=list("aabb"), owners_test=list("bbca"))
    data, federation = federate(dataset, "natural", clients=2, split="official")
    assert federation.owners == ("a", "b")
    np.testing.assert_array_equal(data.test.size, [1, 2])
    # Classes of owners include those of owners with test examples only.
    tested = {"owners": [0, 0, 1, 1], "owners_test": [1, 2, 2, 2], "owner_classes": [[1]] * 3}
    data, _ = federate(numbered(4, n_test=4, classes=1, **tested), "natural", clients=3)
    np.testing.assert_array_equal(data.classes, [[True]] * 3)


def test_every_partition_works_with_a_hundred_classes():
    more = {"coarse": np.arange(100) // 5, "owners": np.arange(6000) // 60}
    dataset = arrays(np.zeros((6000, 1), np.float32), np.arange(6000) % 100, **more)
    for name in PARTITIONS:
        few = {"classes": 40, "dominant": 118, "listed": 12}
        small = {"examples": few[name]} if name in few else {}
        _, federation = federate(dataset, name, clients=20, settings=small)
        assert federation.clients == 20
        assert federation.counts.min() > 0
