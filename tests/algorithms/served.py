"""Helpers for tests of methods: paths of leaves, a few rounds, the model of a client."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, State
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.core.randomness import TRAIN, stage_key
from fedjax_pfl.simulation.rounds import make_rounds
from tests import tiny

KEY = jax.random.key(3)


def paths(tree: Any) -> list[str]:
    """Returns the path of every leaf, such as params/fc1/kernel."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sorted("/".join(str(entry.key) for entry in path) for path, _ in leaves)


def after_rounds(algorithm: Algorithm, n: int, clients: int = tiny.CLIENTS) -> tuple[State, Any]:
    """Returns the state after n rounds with all clients, and their log."""
    data, federation = tiny.federated(clients=clients)
    rounds = make_rounds(algorithm, federation, cohort=clients, max_rounds=n, evaluate_after=False)
    state, (log,) = rounds.run(KEY, rounds.init(KEY), data, jnp.int32(0), jnp.int32(n))
    return state, log


def served(algorithm: Algorithm, state: State, i: int) -> Any:
    """Returns the variables that client i is served."""
    data = client_data(tiny.federated()[0], jnp.int32(i))
    client = trees.row(state.clients, i)
    return algorithm.personalize(state, client, ClientContext(i, data, 0, KEY))


def trained(algorithm: Algorithm, state: State, i: int) -> tuple[Any, Any, Any, Any]:
    """Returns the result of client i's local training in round 0."""
    data, client = tiny.federated()[0], trees.row(state.clients, i)
    payload = algorithm.send(state, ClientContext(i, None, 0, KEY))
    key = stage_key(KEY, TRAIN, 0, i)
    ctx = ClientContext(jnp.int32(i), client_data(data, i), jnp.int32(0), key)
    return jax.jit(algorithm.train)(payload, client, ctx)
