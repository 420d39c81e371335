"""Conditions on the states of a run that show that a method's interesting branch ran."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import State
from tests import tiny

Condition = Callable[[State, State], bool]  # (first state, last state)
LAYOUT = (1, 2, 2)  # blocks in each layer of FedMN


def moved(first: Any, last: Any) -> bool:
    """Returns True if every leaf changed."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)
    return all(bool((a != b).any()) for a, b in pairs)


def all_of(*conditions: Condition) -> Condition:
    """Requires all conditions."""
    return lambda first, last: all(condition(first, last) for condition in conditions)


def moved_and(condition: Callable[[State], bool]) -> Condition:
    """Requires that every leaf moved and that a condition holds for the last state."""
    return lambda first, last: moved(first, last) and bool(condition(last))


def params_differ(a: Any, b: Any) -> bool:
    """Returns True if the parameters of two variables are not nearly equal."""
    pairs = zip(jax.tree.leaves(a["params"]), jax.tree.leaves(b["params"]), strict=True)
    return sum(float(np.sum(np.square(np.subtract(a, b)))) for a, b in pairs) > 1e-6


def client_layers(names: set[str]) -> Callable[[State], bool]:
    """Requires that exactly these layers are client-side state."""
    return lambda last: set(trees.layers(last.clients.personal)) == names


def two_parts(personal_layers: set[str]) -> Condition:
    """Requires that both parts moved, and that these layers differ between clients."""

    def split(last: State) -> bool:
        personal = jax.tree.leaves(last.clients.personal)
        differ = all(bool((leaf[0] != leaf[1]).any()) for leaf in personal)
        return differ and not personal_layers & set(trees.layers(last.server))

    return all_of(moved_and(client_layers(personal_layers)), moved_and(split))


def routed(first: State, last: State) -> bool:
    """Requires blocks on the paths of some clients only, and a router that moved."""
    active = jax.jit(jax.vmap(lambda gates: router.active(gates, LAYOUT, trimmed=True)))
    used = jax.device_get(active(last.clients.gates))
    gates = [trees.split(state.server["params"], {"router_gates"})[0] for state in (first, last)]
    return moved(*gates) and not bool(used.all()) and bool(used.any(0).all())


def split(first: State, last: State) -> bool:
    """Requires several clusters with different models, and two free places."""
    used = int(last.server.used)
    models = (trees.row(last.server.models, c) for c in (0, used - 1))
    return set(last.rows.tolist()) == set(range(used)) and used > 1 and params_differ(*models)


def chosen(first: State, last: State) -> bool:
    """Requires that clients have chosen two clusters or more, and that the shared layers moved."""
    pairs = [[trees.row(state.server.clusters, c) for state in (first, last)] for c in range(6)]
    changed = [params_differ(*pair) for pair in pairs]
    return sum(changed) >= 2 and moved(first.server.shared, last.server.shared)


def mixed(last: State) -> bool:
    """Requires different components, and different weights of them at the clients."""
    components = (trees.row(last.server, m) for m in (0, 1))
    return bool(np.std(last.clients.pi, 0).min() > 1e-3) and params_differ(*components)


def near_shared(last: State) -> bool:
    """Requires client models that are not the shared model."""
    shared = jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (tiny.CLIENTS, *leaf.shape)), last.server
    )
    return params_differ(last.clients.variables, shared)


def alpha_moves(last: State) -> bool:
    """Requires positive alpha that differ between clients."""
    alpha = np.asarray(last.clients.alpha)
    return bool(np.unique(alpha).size > 1 and (alpha > 0).all())


def partly_mixed(first: State, last: State) -> bool:
    """Requires weights of 1 and weights between 0 and 1."""
    weights = np.concatenate([w.ravel() for w in jax.tree.leaves(last.clients.mixing.weights)])
    part, learned = (weights < 1) & (weights > 0), np.asarray(last.clients.mixing.learned)
    return bool(part.any() and (weights == 1).any() and learned.any())


def only_body(first: State, last: State) -> bool:
    """Requires an unchanged head and a body that moved."""
    heads = zip(*(jax.tree.leaves(state.clients.personal) for state in (first, last)), strict=True)
    bodies = [(state.server, state.clients.momentum) for state in (first, last)]
    unchanged = all((a == b).all() for a, b in heads)
    return client_layers({"fc2"})(last) and unchanged and moved(*bodies)


def mean_of_clients(name: str, field: str) -> Callable[[State], bool]:
    """Requires that a server value is the mean of a client-side field, despite dropouts."""

    def fired(last: State) -> bool:
        client_leaves = jax.tree.leaves(getattr(last.clients, field))
        pairs = zip(jax.tree.leaves(last.server[name]), client_leaves, strict=True)
        return all(np.allclose(a, np.mean(b, 0), rtol=1e-4, atol=1e-6) for a, b in pairs)

    return fired


def models_differ(first: State, last: State) -> bool:
    """Requires that every leaf of the rows moved, and that those of two clients differ."""
    return moved(first.rows, last.rows) and params_differ(
        *(trees.row(last.rows, i) for i in (0, 1))
    )
