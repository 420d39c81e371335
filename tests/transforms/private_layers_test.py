"""Layers kept at home, around any method."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.transforms.private_layers import private_layers, with_own
from tests import cases, tiny
from tests.algorithms.served import KEY, after_rounds, served

DATA, FEDERATION = tiny.federated()
HEAD = 4 * (tiny.HIDDEN + 1) * tiny.CLASSES


def at_home(algorithm):
    return private_layers(tiny.Net(), FEDERATION, DATA, {"fc2"})(algorithm)


def kept(name, **changes):
    made = cases.make(name, FEDERATION, **changes)
    return at_home(made)


def test_fedavg_without_its_head_is_fedper():
    own, _ = after_rounds(kept("fedavg"), 3)
    fedper, _ = after_rounds(cases.make("fedper", FEDERATION), 3)
    chex.assert_trees_all_equal(own.clients.own, fedper.clients.own)
    body, head = trees.split(own.server, {"fc1", "norm1"})
    chex.assert_trees_all_equal(body, fedper.server)
    assert set(head["params"]) == {"fc2"}
    chex.assert_trees_all_equal(
        served(kept("fedavg"), own, 3), served(cases.make("fedper", FEDERATION), fedper, 3)
    )


@pytest.mark.slow("two programs for each method")
@pytest.mark.parametrize("name", ["fedfomo", "pfedla", "per_fedavg", "factorized_fl_moved"])
def test_no_head_leaves_its_client(name):
    """What the server has of heads is what it began with; clients' differ; bytes have none."""
    made, plain = kept(name), cases.make(name, FEDERATION)
    state, log = after_rounds(made, 2)
    heads = [
        np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path((state.server, state.rows))
        if jax.tree_util.DictKey("fc2") in path
    ]
    assert heads
    for leaf in heads:
        stacked = leaf if len(leaf) == tiny.CLIENTS else leaf[None]
        np.testing.assert_allclose(stacked, np.broadcast_to(stacked[:1], stacked.shape), rtol=1e-5)
    own = np.asarray(state.clients.own["params"]["fc2"]["kernel"])
    assert all((own[0] != own[i]).any() for i in range(1, tiny.CLIENTS))
    assert "fc2" not in log.down
    assert "fc2" not in log.up
    _, whole = after_rounds(plain, 2)
    assert "fc2" in whole.up
    model = served(made, state, 2)
    if name in ("pfedla", "factorized_fl_moved"):
        np.testing.assert_allclose(model["params"]["fc2"]["kernel"], own[2], rtol=1e-5)


@pytest.mark.parametrize("name", ["local", "fedper", "fedrep", "pfedhn_pc", "factorized_fl"])
def test_what_is_not_shared_anyway_is_as_it_was(name):
    made = cases.make(name, FEDERATION)
    assert at_home(made) is made


def test_own_layers_reach_every_model_in_a_tree():
    own = {"params": {"b": {"w": jnp.array([5.0])}}}

    def model(*lead):
        return {"params": {"a": {"w": jnp.zeros((*lead, 1))}, "b": {"w": jnp.zeros((*lead, 1))}}}

    got = with_own({**model(), "peers": model(3), "ids": jnp.arange(2)}, own)
    np.testing.assert_array_equal(got["params"]["b"]["w"], [5])
    np.testing.assert_array_equal(got["peers"]["params"]["b"]["w"], [[5]] * 3)
    np.testing.assert_array_equal(got["peers"]["params"]["a"]["w"], [[0]] * 3)
    np.testing.assert_array_equal(got["ids"], [0, 1])


@pytest.mark.slow("two phases")
def test_a_later_phase_goes_on_with_the_heads():
    state, _ = after_rounds(kept("fedavg"), 2)
    begun = kept("per_fedavg").init(KEY, state)
    chex.assert_trees_all_equal(begun.clients.own, state.clients.own)
    chex.assert_trees_all_equal(begun.server, state.server)
    plain, _ = after_rounds(cases.make("fedavg", FEDERATION), 2)
    head = kept("fedavg").init(KEY, plain).clients.own["params"]["fc2"]["kernel"]
    np.testing.assert_array_equal(head[4], plain.server["params"]["fc2"]["kernel"])


def test_groups_are_refused():
    both = by_group((cases.make("fedavg", FEDERATION), cases.make("fedavg", FEDERATION)))
    with pytest.raises(UsageError, match="without groups"):
        at_home(both)


@pytest.mark.parametrize("name", ["pfedhn", "fedem", "fedmn"])
def test_methods_without_one_shared_model_are_refused(name):
    with pytest.raises(UsageError, match="leave it off"):
        kept(name)


def test_fedfomos_last_start_has_the_clients_own_head():
    made = kept("fedfomo")
    state, _ = after_rounds(made, 2)
    own = jax.tree.map(lambda leaf: leaf + 7.0, state.clients.own)
    moved = with_own(state.clients.method, own, 0)
    np.testing.assert_array_equal(
        moved.start["params"]["fc2"]["kernel"], own["params"]["fc2"]["kernel"]
    )
    chex.assert_trees_all_equal(moved.momentum, state.clients.method.momentum)
