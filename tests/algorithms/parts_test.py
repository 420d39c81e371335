"""Models in two parts: cutting and joining, and what a phase may start from."""

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
    chosen, others = trees.split(nested, {"a", "block/c"})
    assert chosen == {
        "params": {"a": {"w": 1, "b": 2}, "block": {"c": {"w": 4}}},
        "batch_stats": {"block": {"c": {"mean": 5}}},
    }
    assert others == {"params": {"block": {"a": {"w": 3}}}}
    assert trees.join(chosen, others) == trees.join(others, chosen) == nested
    assert trees.split(nested, ()) == ({}, nested)


def test_what_is_in_both_parts_cannot_be_joined():
    with pytest.raises(ValueError, match="both"):
        trees.join({"params": {"a": {"w": np.ones(2)}}}, {"params": {"a": {"w": np.ones(2)}}})


def test_alike():
    one, shape = {"w": np.ones((2, 3), np.float32)}, jax.ShapeDtypeStruct((2, 3), np.float32)
    assert trees.same_shapes(one, {"w": shape})
    assert not trees.same_shapes(one, {"v": shape})
    assert not trees.same_shapes(one, {"w": None})
    assert not trees.same_shapes(one, {"w": jax.ShapeDtypeStruct((2, 4), np.float32)})
    assert not trees.same_shapes(one, {"w": jax.ShapeDtypeStruct((2, 3), np.int32)})


def test_a_phase_goes_on_from_its_own_kind():
    """Models are taken over, for FedRep those of FedPer too; momentum begins anew."""
    federation = tiny.federated()[1]
    state, _ = after_rounds(cases.make("fedper", federation), 2)
    for name in ("fedper", "fedrep"):
        begun = cases.make(name, federation).init(KEY, state)
        chex.assert_trees_all_equal(begun.server, state.server)
        chex.assert_trees_all_equal(begun.clients.own, state.clients.own)
        assert not any(leaf.any() for leaf in jax.tree.leaves(begun.clients.momentum))


def test_other_parts_are_no_start():
    federation = tiny.federated()[1]
    state = cases.make("fedper", federation).init(KEY)
    with pytest.raises(UsageError, match="global model of the same network"):
        cases.make("fedbn", federation).init(KEY, state)
