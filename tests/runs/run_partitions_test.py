"""Tests which partitions one program can train on."""

import jax
import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl.runs import run_partitions
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation.sweep import SeparateRunsError

CONFIG = configuration.complete({})


def parts():
    """Returns two partitions of the digits with 20 examples a client."""
    digits = fedjax_pfl.datasets.digits()
    return [
        fedjax_pfl.partition(digits, "classes", clients=3, per_client=4, examples=20, seed=seed)
        for seed in (0, 1)
    ]


def test_facts_that_differ_between_partitions_are_left_out():
    first, second = parts()
    assert not np.array_equal(first.federation.class_counts, second.federation.class_counts)
    assert run_partitions.shared_facts(CONFIG, [first, second]).class_counts is None
    same = run_partitions.shared_facts(CONFIG, [first, first])
    np.testing.assert_array_equal(same.class_counts, first.federation.class_counts)


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": np.array([13, 14, 15])},
        {"validation_counts": np.array([1, 0, 0])},
        {"outputs": 9},
    ],
)
def test_facts_that_shape_the_program_must_be_equal(changes):
    first, second = parts()
    other = second._replace(federation=second.federation._replace(**changes))
    with pytest.raises(SeparateRunsError, match="clients have other numbers of examples"):
        run_partitions.shared_facts(CONFIG, [first, other])


def test_augmented_images_must_be_normalised_in_one_way():
    first, second = parts()
    other = second._replace(examples=second.examples._replace(scale=2 * second.examples.scale))
    assert run_partitions.shared_facts(CONFIG, [first, other])
    augmented = configuration.with_values(CONFIG, {"augment": True})
    with pytest.raises(SeparateRunsError, match="augment is for equally normalised images"):
        run_partitions.shared_facts(augmented, [first, other])


def test_examples_of_several_runs_are_stacked():
    first, second = (part.examples for part in parts())
    assert run_partitions.stack([first]) is first
    stacked = run_partitions.stack([first, second])
    row = jax.tree.map(lambda leaf: leaf[1], stacked)
    jax.tree.map(np.testing.assert_array_equal, row, second)


def test_owners_of_the_test_set_count_if_it_is_pooled():
    x, y = np.zeros((6, 2), np.float32), np.arange(6, dtype=np.int32) % 2
    owned = fedjax_pfl.arrays(x, y, x[:3], y[:3], owners=[0, 0, 0, 1, 1, 1], owners_test=[2] * 3)
    for split, clients, line in (
        ("pooled", 2, "2 of the 3 owners of arrays are clients"),
        ("pooled", 3, ""),
        ("official", 2, ""),
    ):
        config = configuration.with_values(CONFIG, {"partition": "natural", "split": split})
        federation = fedjax_pfl.partition(owned, "natural", clients=2).federation
        federation = federation._replace(owners=tuple(range(clients)))
        assert run_partitions.omitted_owners(config, owned, federation) == line
