"""What tests of single methods need: names of leaves, a few rounds, what a client is served."""

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
    """Every leaf's path, such as params/fc1/kernel."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return sorted("/".join(str(entry.key) for entry in path) for path, _ in found)


def after_rounds(algorithm: Algorithm, n: int, clients: int = tiny.CLIENTS) -> tuple[State, Any]:
    """The state after n rounds in which all take part, and their log."""
    data, federation = tiny.federated(clients=clients)
    rounds = make_rounds(algorithm, federation, cohort=clients, max_rounds=n, evaluate_after=False)
    state, (log,) = rounds.run(KEY, rounds.init(KEY), data, jnp.int32(0), jnp.int32(n))
    return state, log


def served(algorithm: Algorithm, state: State, i: int) -> Any:
    """The variables that client i is served now."""
    own = client_data(tiny.federated()[0], jnp.int32(i))
    client = trees.row(state.clients, i)
    return algorithm.personalize(state, client, ClientContext(i, own, 0, KEY))


def trained(algorithm: Algorithm, state: State, i: int) -> tuple[Any, Any, Any, Any]:
    """Client i's upload, model, state and metrics after one round of its work."""
    data, client = tiny.federated()[0], trees.row(state.clients, i)
    payload = algorithm.send(state, ClientContext(i, None, 0, KEY))
    key = stage_key(KEY, TRAIN, 0, i)
    ctx = ClientContext(jnp.int32(i), client_data(data, i), jnp.int32(0), key)
    return jax.jit(algorithm.train)(payload, client, ctx)
