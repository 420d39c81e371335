"""L2GD on quadratics."""

import chex
import numpy as np

from fedjax_pfl.algorithms.l2gd import Client
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import State
from tests.algorithms import linear
from tests.algorithms.linear import run_rounds, train_client, variables, weights

XS = [[[1.0, 0.0]], [[0.0, 2.0]], [[1.0, 1.0]], [[-1.0, 0.5]]]
YS = [[3.0], [1.0], [-1.0], [0.5]]


def make(rate=0.1, steps=2, **settings):
    training = local_training.sgd(learning_rate=rate, batch_size=1, steps=steps)
    return linear.make("l2gd", XS, YS, training, **settings)


def test_two_steps_by_hand():
    """Training starts from 0.75 (1, 1) + 0.25 (5, −3), which is also served; f = ½ (θ₀ − 3)²."""
    algorithm, data = make(pull=0.25)
    mean, client = variables([5.0, -3.0]), Client(variables([1.0, 1.0]), ())
    x = np.array([2.0, 0.0])
    served = algorithm.personalize(State(mean, (), ()), client, None)
    np.testing.assert_allclose(weights(served), x, rtol=1e-6)
    for _ in range(2):
        x = x - 0.1 * np.array([x[0] - 3, 0.0])
    result = train_client(algorithm, mean, client, data)
    np.testing.assert_allclose(weights(result.variables), x, rtol=1e-6)
    chex.assert_trees_all_equal(result.upload, result.client.variables)
    assert algorithm.kept_change == 0.75


def test_the_mean_is_unweighted_and_without_absent_clients():
    algorithm, _ = make()
    uploads = [variables(w) for w in ([1.0, 0.0], [3.0, 4.0], [9.0, 9.0], [9.0, 9.0])]
    state = State(variables([7.0, 7.0]), (), ())
    new_state = linear.receive(algorithm, state, [1, 30, 5, 5], uploads, [True, True, False, False])
    np.testing.assert_allclose(weights(new_state.server), [2.0, 2.0], rtol=1e-6)


def test_it_converges_to_the_minimum_of_the_papers_objective():
    """mean_i f_i + λ/2 mean_i ‖x_i − x̄‖² with ρ = ηλS: many rounds of one small step."""
    rate, penalty = 0.02, 3.0
    algorithm, data = make(rate, 1, pull=rate * penalty)
    x, y = np.array(XS)[:, 0], np.array(YS)[:, 0]
    # The optimum solves one linear system in all x_i: ∇f_i + λ (x_i − x̄) = 0.
    system = np.kron(penalty * (np.eye(4) - 0.25), np.eye(2))
    for i in range(4):
        system[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] += np.outer(x[i], x[i])
    best = np.linalg.solve(system, (x * y[:, None]).ravel()).reshape(4, 2)
    state = State(variables(best.mean(0)), (), Client(trees.repeat(variables([0.0, 0.0]), 4), ()))
    state, _ = run_rounds(algorithm, state, data, [1] * 4, 1500)
    np.testing.assert_allclose(weights(state.clients.variables), best, atol=0.05)
    assert np.abs(best - best.mean(0)).max() > 0.3
