"""A phase starts from a global model or continues a state of the same method."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from tests import cases, tiny
from tests.algorithms.limits_test import XS, YS, after_rounds
from tests.algorithms.linear import KEY, make_classifier
from tests.settings.configuration_test import built

pytestmark = pytest.mark.slow("two phases of many methods")


def served(name, state, i):
    """Returns the parameters that client i is served."""
    algorithm, data = make_classifier(name, XS, YS)
    ctx = ClientContext(i, client_data(data, i), 0, KEY)
    shared = state._replace(clients=())
    return algorithm.personalize(shared, trees.row(state.clients, i), ctx)["params"]


@pytest.mark.parametrize(
    "name",
    [
        *("apfl", "ditto", "fedala", "fedas", "fedcac", "feddbe", "feddyn", "fedpac", "fedper"),
        *("fedrep", "l2gd", "lg_fedavg", "moon", "pfedgraph", "scaffold"),
    ],
)
def test_starts_of_phases(name):
    """After FedAvg all clients are served its model. After the method its state is unchanged."""
    algorithm, _ = make_classifier(name, XS, YS)
    start, _ = after_rounds("fedavg")
    state = algorithm.init(KEY, start)
    for i in (0, 3):
        chex.assert_trees_all_close(
            served(name, state, i), start.server["params"], rtol=1e-6, atol=1e-7
        )
    earlier, _ = after_rounds(name)
    continued = algorithm.init(jax.random.key(9), earlier)
    chex.assert_trees_all_close(continued[:2], earlier[:2], rtol=1e-6, atol=1e-7)
    for i in (0, 3):
        chex.assert_trees_all_equal(served(name, continued, i), served(name, earlier, i))


@pytest.mark.parametrize(
    "name", ["fedamp", "fedfomo", "fedgh", "fedproto", "fedtgp", "local", "pfedla"]
)
def test_a_phase_continues_its_own_state(name):
    """The state of the earlier phase is unchanged, except for the optimiser's, which is new."""
    algorithm = cases.make(name, tiny.federated()[1])
    new = algorithm.init(KEY)
    earlier = jax.tree.map(jnp.ones_like, new)
    continued = algorithm.init(jax.random.key(9), earlier)
    chex.assert_trees_all_equal(continued[:2], earlier[:2])
    expected = earlier.clients._replace(momentum=new.clients.momentum)
    chex.assert_trees_all_equal(continued.clients, expected)


def test_gpfl_cannot_start_from_another_network():
    federation = tiny.federated()[1]
    start = jax.eval_shape(cases.make("gpfl", federation).init, KEY)
    algorithm = algorithms.gpfl(tiny.Net(hidden=4), cases.training(), federation)
    with pytest.raises(UsageError, match="gpfl with the same network"):
        algorithm.init(KEY, start)


def test_fml_continues_personal_models():
    algorithm, _ = make_classifier("fml", XS, YS)
    earlier = after_rounds("fml")[0]
    continued = algorithm.init(jax.random.key(9), earlier)
    chex.assert_trees_all_equal(continued.server, earlier.server)
    chex.assert_trees_all_equal(continued.clients.personal, earlier.clients.personal)


def test_apfl_continues_shares_that_adapt():
    """With a fixed share the phase's own setting counts."""
    federation = tiny.federated()[1]
    for alpha_rate, expected in ((0.1, 0.9), (0.0, 0.5)):
        algorithm = cases.make("apfl", federation, {"alpha": 0.5, "alpha_rate": alpha_rate})
        start = algorithm.init(KEY)
        start = start._replace(clients=start.clients._replace(alpha=start.clients.alpha * 0 + 0.9))
        np.testing.assert_allclose(algorithm.init(KEY, start).clients.alpha, expected, rtol=1e-6)


def test_fedrep_continues_fedper_without_its_momentum():
    algorithm, _ = make_classifier("fedrep", XS, YS)
    earlier, _ = after_rounds("fedper")
    state = algorithm.init(KEY, earlier)
    chex.assert_trees_all_equal(state.server, earlier.server)
    chex.assert_trees_all_equal(state.clients.personal, earlier.clients.personal)
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.clients.momentum))


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("fedbn", "fedper", "global model of the same network"),
        ("fedgh", "local", "global model of the same network"),
        ("fedem", "fedavg", "copies"),
        ("ifca", "fedavg", "copies"),
        ("factorized_fl", "fedavg", "same settings"),
        ("pfedhn", "fedavg", "can only start from one of the same"),
        ("pfedpara", "fedavg", "kernels cannot be written as its factors"),
    ],
)
def test_a_phase_cannot_start_from_other_states(name, start, message):
    federation = tiny.federated()[1]
    state = jax.eval_shape(cases.make(start, federation).init, KEY)
    with pytest.raises(UsageError, match=message):
        cases.make(name, federation).init(KEY, state)


@pytest.mark.parametrize(
    "name", ["factorized_fl", "factorized_fl_moved", "fedamp", "fedfomo", "pfedla"]
)
def test_newcomers_mix_models_of_the_earlier_phase_and_no_other_model_depends_on_them(name):
    """Newcomers 4 and 5 join after clients 0 to 3. A client's payload is a mixture of rows."""
    data, federation = tiny.federated()
    active = np.arange(federation.clients) < 4
    before = cases.make(name, federation._replace(active=active))
    after = cases.make(name, federation._replace(active=~active, earlier=active))
    state = jax.tree.map(
        lambda leaf: leaf + jax.random.uniform(KEY, leaf.shape, leaf.dtype), before.init(KEY)
    )

    def payload(algorithm, i, **rows):
        ctx = ClientContext(np.int32(i), client_data(data, i), np.int32(3), KEY)
        return algorithm.send(state._replace(clients=(), **rows), ctx)

    def differs(i, j):
        """Returns True if the payload of client i depends on the stored model of client j."""
        changed = jax.tree.map(lambda leaf: leaf.at[j].add(1), state.rows)
        new, old = payload(after, i, rows=changed), payload(after, i)
        return any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), new, old)))

    for i in (0, 3):
        chex.assert_trees_all_equal(payload(after, i), payload(before, i))
        assert not differs(i, 4)
    assert any(differs(4, j) for j in range(4))


def test_a_phase_of_held_out_clients_knows_who_trained_before():
    phases = ({"participants": "held_out"}, {}, {"participants": "held_out"}, {})
    experiment = built({"clients": 3, "held_out": 1, "rounds": 1, "phases": phases})
    earlier = [phase.federation.earlier for phase in experiment.phases]
    assert [earlier[0], earlier[1], earlier[3]] == [None] * 3
    np.testing.assert_array_equal(earlier[2], [True, True, False])


def test_newcomers_mix_models_of_their_own_network_only():
    """Clients 1 and 3 have another network than newcomer 4, so nothing is stored for them."""
    networks = ({"mlp": {"hidden": (8,)}}, {"mlp": {"hidden": (4,)}})
    phases = ({}, {"participants": "held_out"})
    changes = {"algorithm": "fedamp", "clients": 6, "held_out": 2, "groups": networks}
    experiment = built({**changes, "model": "mlp", "rounds": 1, "phases": phases})
    inputs = experiment.phases[1].inputs
    np.testing.assert_array_equal(inputs.federation.groups, [0, 1, 0, 1, 0, 1])
    algorithm = inputs.algorithms(inputs.configs[0].conv)[0]
    xi = algorithm.observe(algorithm.init(KEY))["xi_group0"]
    assert (xi[4] > 0).tolist() == [True, False, True, False, True, False]


def test_attackers_are_not_drawn_for_the_evaluation():
    """Their scores do not count, so the evaluation would have no score at all."""
    attack = {"attack": "sign_flip", "attack_share": 0.4}
    for count, seed in ((1, 0), (1, 1), (1, 2), (3, 3), (4, 3)):
        settings = {"clients": 5, "partition_seed": seed, "rounds": 1, **attack}
        settings["evaluate_clients"] = count
        inputs = built({**settings, "algorithm": "fedavg"}).phases[0].inputs
        assert len(inputs.evaluated) == min(count, 3)
        assert not inputs.is_attacker[inputs.evaluated].any()


def test_held_out_clients_are_not_drawn_for_the_evaluation():
    settings = {"clients": 4, "held_out": 2, "rounds": 1, "algorithm": "fedavg"}
    for count, ids in ((None, None), (2, [0, 1])):
        inputs = built({**settings, "evaluate_clients": count}).phases[0].inputs
        assert ids == (None if inputs.evaluated is None else inputs.evaluated.tolist())
    inputs = built({"clients": 4, "evaluate_clients": 4, "rounds": 1}).phases[0].inputs
    assert inputs.evaluated is None
