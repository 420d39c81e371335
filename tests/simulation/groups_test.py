"""Tests of groups of architectures, validation after training, and the start of a phase."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, Federation, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.simulation.records import CompiledRounds
from fedjax_pfl.simulation.rounds import make_rounds
from tests import tiny
from tests.simulation.rounds_test import KEY, scalar

GROUPS = np.array([0, 1, 0, 1, 0, 1])


def narrow_and_wide(federation: Federation, name: str = "fedavg") -> tuple[Algorithm, ...]:
    training = local_training.sgd(momentum=0.9, epochs=1, keep_optimizer=True)
    factory = getattr(algorithms, name)
    return tuple(factory(MLP(tiny.CLASSES, (width,)), training, federation) for width in (2, 3))


def random_step(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    """Replaces training, which is slow to compile, by a random step."""
    length = jax.random.uniform(ctx.key)
    new = jax.tree.map(lambda leaf: leaf + length * jnp.cos(9 * leaf), payload)
    client = jax.tree.map(lambda leaf: leaf + length, client)
    return ClientResult(new, new, client, {"loss": length})


def correct(server: Any, data: Any, i: int) -> int:
    """Returns the number of test examples of a client that NumPy predicts correctly."""
    first, second = server["params"]["fc1"], server["params"]["fc2"]
    rows = np.asarray(data.test.rows)[i, : tiny.TEST[i]]
    hidden = np.maximum(np.asarray(data.x)[rows] @ first["kernel"] + first["bias"], 0)
    outputs = hidden @ second["kernel"] + second["bias"]
    return int((outputs.argmax(1) == np.asarray(data.y)[rows]).sum())


@pytest.mark.slow("programs of two groups")
def test_groups_equal_two_runs():
    """Compares with two runs where the other group is inactive, and scores with NumPy."""
    data, federation = tiny.federated()
    federation = federation._replace(groups=GROUPS)
    pair = tuple(a._replace(train=random_step) for a in narrow_and_wide(federation))

    def compiled(algorithm: Algorithm, active: np.ndarray, groups: np.ndarray) -> CompiledRounds:
        subset = federation._replace(active=active, groups=groups)
        cohort = int(active.sum())
        return make_rounds(algorithm, subset, cohort=cohort, max_rounds=2, evaluate_after=False)

    def run(rounds: CompiledRounds, start: State) -> Any:
        return jax.device_get(rounds.run(KEY, start, data, scalar(0), scalar(2)))

    rounds = compiled(by_group(pair), federation.active, GROUPS)
    first = jax.device_get(rounds.init(KEY))
    state, logs = run(rounds, first)
    for g, algorithm in enumerate(pair):
        start = State(*(part[g] for part in first))
        expected, (log,) = run(compiled(algorithm, g == GROUPS, 0 * GROUPS), start)
        group_state = State(*(part[g] for part in state))
        chex.assert_trees_all_close(group_state, expected, rtol=1e-6, atol=1e-6)
        chex.assert_trees_all_close(logs[g], log, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(log.ids, [np.flatnonzero(g == GROUPS)] * 2)
    width = [trees.size(server["params"]) for server in state.server]
    assert width == [5 * 2 + 2 + 2 * 3 + 3, 5 * 3 + 3 + 3 * 3 + 3]
    scores = jax.device_get(rounds.evaluate(KEY, state, data, scalar(2)))
    np.testing.assert_array_equal(scores.before.examples, tiny.TEST)
    np.testing.assert_array_equal(scores.validation.examples, tiny.VALIDATION)
    expected = [correct(state.server[g], data, i) for i, g in enumerate(GROUPS)]
    np.testing.assert_array_equal(scores.before.metrics["accuracy"], expected)


def test_validation_before_or_after_local_training():
    data, federation = tiny.federated()
    data = data._replace(validation=data.test)
    algorithm, _ = narrow_and_wide(federation)

    def scored(validate_after: bool) -> Any:
        rounds = make_rounds(algorithm, federation, cohort=6, validate_after=validate_after)
        return jax.device_get(rounds.evaluate(KEY, rounds.init(KEY), data, scalar(0)))

    served, trained = scored(False), scored(True)
    assert np.any(served.before.loss != served.after.loss)
    chex.assert_trees_all_equal(served.validation, served.before)
    chex.assert_trees_all_equal(trained.validation, trained.after)
    chex.assert_trees_all_equal((trained.before, trained.after), (served.before, served.after))


def test_a_phase_starts_from_the_global_model():
    _, federation = tiny.federated()
    fedavg, wide = narrow_and_wide(federation)
    local, wide_local = narrow_and_wide(federation, "local")
    first = jax.jit(fedavg.init)(jax.random.key(0))
    key = jax.random.key(1)

    chex.assert_trees_all_equal(fedavg.init(key, first).server, first.server)
    with_moments = first._replace(server={**first.server, "moments": first.server["params"]})
    chex.assert_trees_all_equal(fedavg.init(key, with_moments).server, first.server)

    copies = local.init(key, first)
    assert (copies.server, copies.rows) == ((), ())
    chex.assert_trees_all_equal(copies.clients.variables, trees.repeat(first.server, 6))
    assert not any(leaf.any() for leaf in jax.tree.leaves(copies.clients.momentum))

    for start in (copies, jax.eval_shape(wide.init, key), first._replace(server=())):
        with pytest.raises(UsageError, match="global model of the same network"):
            fedavg.init(key, start)

    groups = State(*((part, part) for part in first))
    with pytest.raises(UsageError, match="global model of the same network"):
        by_group((local, wide_local)).init(key, groups)
    state = by_group((local, local)).init(key, groups)
    chex.assert_trees_all_equal(state.clients, (copies.clients, copies.clients))

    shared = by_group((fedavg, fedavg)).init(key, first)  # after a phase with one server for all
    chex.assert_trees_all_equal(shared.server, (first.server, first.server))
    with pytest.raises(UsageError, match="global model of the same network"):
        by_group((fedavg, wide)).init(key, first)
