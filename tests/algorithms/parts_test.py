"""Models in two parts: splitting, joining, and starts of phases."""

import chex
import jax
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds


def test_split_and_join():
    nested = {
        "params": {"a": {"w": 1, "b": 2}, "block": {"a": {"w": 3}, "c": {"w": 4}}},
        "batch_stats": {"block": {"c": {"mean": 5}}},
    }
    selected, remaining = trees.split(nested, {"a", "block/c"})
    assert selected == {
        "params": {"a": {"w": 1, "b": 2}, "block": {"c": {"w": 4}}},
        "batch_stats": {"block": {"c": {"mean": 5}}},
    }
    assert remaining == {"params": {"block": {"a": {"w": 3}}}}
    assert trees.join(selected, remaining) == trees.join(remaining, selected) == nested
    assert trees.split(nested, ()) == ({}, nested)


def test_overlapping_parts_cannot_be_joined():
    with pytest.raises(ValueError, match="both"):
        trees.join({"params": {"a": {"w": np.ones(2)}}}, {"params": {"a": {"w": np.ones(2)}}})


def test_same_shapes():
    tree, shape = {"w": np.ones((2, 3), np.float32)}, jax.ShapeDtypeStruct((2, 3), np.float32)
    assert trees.same_shapes(tree, {"w": shape})
    assert not trees.same_shapes(tree, {"v": shape})
    assert not trees.same_shapes(tree, {"w": None})
    assert not trees.same_shapes(tree, {"w": jax.ShapeDtypeStruct((2, 4), np.float32)})
    assert not trees.same_shapes(tree, {"w": jax.ShapeDtypeStruct((2, 3), np.int32)})


def test_a_phase_continues_a_split_model():
    """FedPer and FedRep continue the models of FedPer; momentum starts at zero."""
    federation = tiny.federated()[1]
    state, _ = after_rounds(cases.make("fedper", federation), 2)
    for name in ("fedper", "fedrep"):
        later = cases.make(name, federation).init(KEY, state)
        chex.assert_trees_all_equal(later.server, state.server)
        chex.assert_trees_all_equal(later.clients.personal, state.clients.personal)
        assert not any(leaf.any() for leaf in jax.tree.leaves(later.clients.momentum))


def test_a_phase_cannot_start_from_other_parts():
    federation = tiny.federated()[1]
    state = cases.make("fedper", federation).init(KEY)
    with pytest.raises(UsageError, match="global model of the same network"):
        cases.make("fedbn", federation).init(KEY, state)
