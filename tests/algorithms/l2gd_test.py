"""L2GD on scalar quadratics: pulled, then two steps; its limits are Local and FedAvg."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.l2gd import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.errors import UsageError
from tests.algorithms import linear
from tests.algorithms.linear import KEY, play, variables, weights, work

XS = [[[1.0, 0.0]], [[0.0, 2.0]], [[1.0, 1.0]], [[-1.0, 0.5]]]
YS = [[3.0], [1.0], [-1.0], [0.5]]


def make(name="l2gd", **own):
    data, federation = linear.federated(XS, YS)
    training = local_training.sgd(learning_rate=0.1, batch_size=1, steps=2)
    return getattr(algorithms, name)(linear.Linear(), training, federation, **own), data


def test_two_steps_by_hand():
    """From .75 (1, 1) + .25 (5, −3), on f = ½ (θ₀ − 3)²; it is served the same point."""
    made, data = make(pull=0.25)
    mean, client = variables([5.0, -3.0]), Client(variables([1.0, 1.0]), ())
    x = np.array([2.0, 0.0])
    served = made.personalize(State(mean, (), ()), client, None)
    np.testing.assert_allclose(weights(served), x, rtol=1e-6)
    for _ in range(2):
        x = x - 0.1 * np.array([x[0] - 3, 0.0])
    done = work(made, mean, client, data)
    np.testing.assert_allclose(weights(done.variables), x, rtol=1e-6)
    chex.assert_trees_all_equal(done.upload, done.client.own)


def test_the_mean_is_plain_and_of_those_that_arrived():
    made, _ = make()
    uploads = [variables(w) for w in ([1.0, 0.0], [3.0, 4.0], [9.0, 9.0], [9.0, 9.0])]
    state = State(variables([7.0, 7.0]), (), ())
    met = linear.met(made, state, [1, 30, 5, 5], uploads, [True, True, False, False])
    np.testing.assert_allclose(weights(met.server), [2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize(("pull", "name"), [(0.0, "local"), (1.0, "fedavg")])
def test_limits(pull, name):
    """Bit for bit after three rounds, of clients with as many examples each."""
    (made, data), (other, _) = make(pull=pull), make(name)
    ours, theirs = (play(one, one.init(KEY), data, [1] * 4, 3) for one in (made, other))
    if name == "local":
        chex.assert_trees_all_equal(ours.clients.own, theirs.clients.variables)
    else:
        chex.assert_trees_all_equal(ours.server, theirs.server)


def test_stationary_where_the_papers_objective_is():
    """mean_i f_i + λ/2 mean_i ‖x_i − x̄‖² with ρ = ηλS: after many rounds of one small step each."""
    data, federation = linear.federated(XS, YS)
    rate, penalty = 0.02, 3.0
    training = local_training.sgd(learning_rate=rate, batch_size=1, steps=1)
    made = algorithms.l2gd(linear.Linear(), training, federation, pull=rate * penalty)
    x, y = np.array(XS)[:, 0], np.array(YS)[:, 0]
    # The optimum solves one linear system in all x_i: ∇f_i + λ (x_i − x̄) = 0.
    system = np.kron(penalty * (np.eye(4) - 0.25), np.eye(2))
    for i in range(4):
        system[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] += np.outer(x[i], x[i])
    best = np.linalg.solve(system, (x * y[:, None]).ravel()).reshape(4, 2)
    state = State(variables(best.mean(0)), (), Client(trees.repeat(variables([0.0, 0.0]), 4), ()))
    state = play(made, state, data, [1] * 4, 1500)
    np.testing.assert_allclose(weights(state.clients.own), best, atol=0.05)
    assert np.abs(best - best.mean(0)).max() > 0.3


@pytest.mark.parametrize("pull", [-0.1, 1.5])
def test_wrong_settings(pull):
    with pytest.raises(UsageError, match=r"l2gd\.pull is"):
        make(pull=pull)
    assert jnp.isfinite(pull)
