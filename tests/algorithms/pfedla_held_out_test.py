"""pFedLA's step by the gains of other clients' layers on held-out examples."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers.pfedla import presets
from fedjax_pfl.algorithms import layer_mixing
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Visit
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data, without_fold
from fedjax_pfl.engine.rounds import make_rounds
from tests import cases, tiny
from tests.algorithms.pfedla_test import KEY, N, make


def cut(data: FederatedData, t: int, folds: int) -> FederatedData:
    """The federation's data without the fold that each client leaves out in round t."""
    parts = [without_fold(client_data(data, i), t, folds)[0].train for i in range(N)]
    return data._replace(train=jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))


def test_a_fold_is_every_so_manieth_place_and_another_in_each_round():
    rows = jnp.array([7, 3, 9, 4, 1, 0, 0], jnp.int32)  # five examples, then padding
    data = ClientData(None, None, Split(rows, jnp.int32(5)), None, None, None, None, None)
    for t, left, held in ((0, [3, 4], [7, 9, 1]), (1, [7, 9, 1], [3, 4]), (4, [3, 4], [7, 9, 1])):
        fit, fold = without_fold(data, t, 2)
        assert fit.train.rows[: fit.train.size].tolist() == left
        assert fold.rows[: fold.size].tolist() == held
    alone, none = without_fold(data._replace(train=Split(rows, jnp.int32(1))), 0, 2)
    assert (alone.train.size, none.size) == (1, 0)
    assert alone.train.rows[0] == 7


@pytest.mark.slow("three methods' runs")
def test_with_held_out_examples_the_limits_are_fedavg_and_local():
    """At rate 0 the mean of all, weighed alike; with all layers retained what each had."""
    data, federation = tiny.federated()
    without = cut(data, 0, 3)
    local = make_rounds(make("local"), cases.TASK, federation, cohort=N, calls=1)
    alone, _ = local.run(KEY, local.init(KEY), without, 0, 1)
    trained = alone.clients.variables["params"]
    for own, wanted in (
        ({"rate": 0.0}, lambda i: trees.weighted_mean(trained, jnp.ones(N))),
        ({"rate": 5.0, "k": 3}, lambda i: trees.row(trained, i)),
    ):
        algorithm = make(folds=3, **own)
        rounds = make_rounds(algorithm, cases.TASK, federation, cohort=N, calls=1)
        state, _ = rounds.run(KEY, rounds.init(KEY), data, 0, 1)
        for i in range(N):
            visit = Visit(jnp.int32(i), None, jnp.int32(1), KEY)
            got = algorithm.send(state._replace(clients=()), visit)["params"]
            chex.assert_trees_all_close(got, wanted(i), rtol=1e-5, atol=1e-6)


def test_once_in_so_many_rounds_all_layers_come_down():
    """With refresh=3 in rounds 2 and 5; in the others, and always where it is 0, k stay."""
    for refresh, wanted in ((3, [2, 2, 0, 2, 2, 0]), (0, [2] * 6), (1, [0] * 6)):
        algorithm = make(k=2, refresh=refresh)
        state = algorithm.init(KEY)._replace(clients=())
        bill = []
        for t in range(6):
            payload = algorithm.send(state, Visit(jnp.int32(1), None, jnp.int32(t), KEY))
            stays = np.asarray(payload["retained"])
            down = algorithm.traffic(payload, {}).down
            assert sum(int(amount) == 0 for amount in down.values()) == stays.sum()
            bill.append(int(stays.sum()))
        assert bill == wanted


def test_gains_are_held_out_loss_to_first_order_and_sum_to_zero():
    """Layer 0: θ = 1, 2, 4 and g = −3, so 3, 6, 12 less 7; layer 1 has two leaves."""
    theta = {
        "a": jnp.array([[1.0], [2.0], [4.0]]),
        "b": jnp.array([[1.0, 0], [0, 1], [5, 5]]),
        "c": jnp.array([[2.0], [0.0], [9.0]]),
    }
    gradient = {"a": jnp.array([-3.0]), "b": jnp.array([2.0, 1.0]), "c": jnp.array([-1.0])}
    layers = layer_mixing.Layers({}, {"a": 0, "b": 1, "c": 1}, 2, (0, 1))
    everyone = jnp.ones(3, bool)
    found = layer_mixing.gains(theta, gradient, layers, everyone)
    # Layer 1: −2 + 2 = 0, −1 + 0 = −1, −15 + 9 = −6; their mean is −7/3.
    np.testing.assert_allclose(found, [[-4, -1, 5], [7 / 3, 4 / 3, -11 / 3]], rtol=1e-6)
    found = layer_mixing.gains(theta, gradient, layers, jnp.array([True, True, False]))
    np.testing.assert_allclose(found, [[-1.5, 1.5, 0], [0.5, -0.5, 0]], rtol=1e-6)


def test_a_step_moves_what_it_is_of_by_as_much_as_is_wanted():
    """Of a linear map exactly: along w by w itself; nothing where nothing is wanted."""
    matrix = jax.random.normal(KEY, (4, 6))
    wanted = jnp.array([1.0, -2.0, 0.5, 0.0])
    psi = jnp.ones(6)
    moved = layer_mixing.moved(lambda p: matrix @ p, psi, wanted)
    np.testing.assert_allclose(wanted @ (matrix @ (moved - psi)), wanted @ wanted, rtol=1e-5)
    chex.assert_trees_all_equal(layer_mixing.moved(lambda p: matrix @ p, psi, 0 * wanted), psi)


def test_held_out_gradients_are_billed():
    bill = make().traffic({"retained": jnp.zeros(3, bool)}, {})
    plain = make(step="scaled").traffic({"retained": jnp.zeros(3, bool)}, {})
    assert bill.up == {name: 2 * size for name, size in plain.up.items()}
    assert bill.down == plain.down


def test_the_published_form_is_one_word():
    config = presets.get_config("digits-published")
    form = config.pfedla
    assert (form.step, form.rate, form.refresh) == ("scaled", 0.05, 0)
    live = presets.get_config("digits").pfedla
    assert (live.step, live.refresh) == ("held_out", 4)
