"""Tiny configurations of all methods in which the method's interesting branch runs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedpac import mixtures
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, State
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.core.task import classification
from fedjax_pfl.settings import configuration
from fedjax_pfl.testing.example import training
from tests import documents, tiny
from tests.conditions import (
    LAYOUT,
    Condition,
    all_of,
    alpha_moves,
    chosen,
    client_layers,
    mean_of_clients,
    mixed,
    models_differ,
    moved,
    moved_and,
    near_shared,
    only_body,
    params_differ,
    partly_mixed,
    routed,
    split,
    two_parts,
)

TASK = classification()


Bytes = Callable[[int], tuple[int | set[int], int | set[int]]]


class Case(NamedTuple):
    """A method's settings, and what must hold for its state after six rounds."""

    settings: dict[str, Any]
    fired: Condition
    # Possible bytes down and up of one client's round, from the bytes of the model.
    bytes_per_visit: Bytes
    rows_of_absent_move: bool = False  # only pFedHN's momentum and decay of v
    training: dict[str, Any] | None = None  # changes of the settings of `training`


def _next_round(name: str, state: State, **changes: Any) -> tuple[Any, Any]:
    """Returns uploads and models of every client's next round, stacked, with changed settings."""
    data, federation = tiny.federated()
    settings = {**CASES[name].settings, **changes}
    method = getattr(algorithms, name)(tiny.Net(), training(), federation, **settings)
    key, t = jax.random.key(1), jnp.int32(4)

    def client_round(state: State, i: jax.Array) -> tuple[Any, Any]:
        payload = method.send(state, ClientContext(i, None, t, key))
        client = trees.row(state.clients, i)
        return method.train(payload, client, ClientContext(i, client_data(data, i), t, key))[:2]

    clients = jnp.arange(tiny.CLIENTS)
    return jax.device_get(jax.jit(jax.vmap(client_round, (None, 0)))(state, clients))


def _matters(name: str, setting: str, *values: Any, result: int = 0) -> Condition:
    """Requires that two values of a setting give other uploads (0) or models (1)."""

    def fired(first: State, last: State) -> bool:
        return params_differ(*(_next_round(name, last, **{setting: v})[result] for v in values))

    return fired


def _personalised(last: State) -> bool:
    """Requires that theta is not w."""
    return params_differ(*_next_round("pfedme", last))


def _weighed(last: State) -> bool:
    """Requires peers without and peers with a share in a mixture."""
    share = np.maximum(_next_round("fedfomo", last)[0]["weights"], 0.0)
    return bool((share == 0).any() and (share > 0).any())


def _matched(last: State) -> bool:
    """Requires mixed and unmixed clients, and pruned and unpruned entries of mu."""
    settings = CASES["factorized_fl"].settings
    method = algorithms.factorized_fl(tiny.Net(), training(), tiny.federated()[1], **settings)
    diagnostics = jax.device_get(jax.jit(method.observe)(last))
    weights, pruned = diagnostics["weights"], diagnostics["zeros_in_mu"]
    has_mixed = (weights == 0).any() and ((weights > 0).sum(1) > 1).any()
    return bool(has_mixed and (pruned > 0).all() and (pruned < 1).all())


def _collaborated(first: State, last: State) -> bool:
    """Requires client heads, some of them mixed, and a prototype of each class."""
    heads, upload = last.rows["params"]["fc2"]["kernel"], _next_round("fedpac", last)[0]
    a = np.asarray(mixtures(upload["h"], upload["variance"], jnp.ones(tiny.CLIENTS, bool)))
    has_mixed = bool(((a > 0.01) & (a < 0.99)).any() and (a < 1e-6).any())
    return has_mixed and bool((heads[0] != heads[1]).any() and last.server["seen"].all())


def _placed(first: State, last: State) -> bool:
    """Requires regions at different places of the simplex, and endpoints that moved."""
    settings = CASES["floco"].settings
    method = algorithms.floco(tiny.Net(), training(), tiny.federated()[1], **settings)
    places = np.unique(jax.jit(method.observe)(last)["centre"], axis=0)
    has_moved = moved(first.server.variables, last.server.variables)
    return has_moved and bool(last.server.is_placed) and len(places) > 2


_POOL = {"layout": LAYOUT, "width": 4, "hidden": 5, "dropout": 0.2}
# Encoder, φx and router, or encoder and the router's gates; then one or two blocks in each layer.
_ALWAYS, _LIGHT = (108 + 99) + 4 * 2 + 6 * 8, 108 + 4 * 8 + (3 + 9 + 3)
_BLOCKS = (25 + 18, 25 + 36, 50 + 18, 50 + 36)
_ROUTES, _PATHS = ({4 * (size + blocks) for blocks in _BLOCKS} for size in (_ALWAYS, _LIGHT))
_ONCE = {size + 4 * (99 + 9) for size in _PATHS}  # φx and φy in a client's first round
_NORM = 4 * tiny.HIDDEN  # scale, bias, mean and variance
_HEAD = (tiny.HIDDEN + 1) * tiny.CLASSES
_PROTOTYPES = 4 * tiny.CLASSES * tiny.HIDDEN
# Two hidden layers of four units; a first layer, three more, and heads for 83 parameters.
_PSI, _PHI = 9 * 4 + 5 * 4 + 5 * 2, 3 * 7 + 3 * 8 * 7 + 8 * 83
_VALVE = 4 * 2 * tiny.HIDDEN * (tiny.HIDDEN + 3)


def _without(entries: int) -> Bytes:
    """Returns the bytes of a model without some entries, down and up."""
    return lambda model: (model - 4 * entries,) * 2


def _factors(rank: int, head: int) -> set[int]:
    """Returns possible bytes: u, v, scale and shift, the head, and nonzero entries of mu."""
    fixed = rank * (tiny.FEATURES + tiny.HIDDEN) + _NORM // 2 + head
    return {4 * (fixed + entries) for entries in range(tiny.FEATURES * tiny.HIDDEN + 1)}


CASES = {
    "factorized_fl": Case(
        {"tau": 0.9999, "minimum": 2, "sparsity": 0.02, "rank": 5},
        moved_and(_matched),
        lambda model: (_factors(5, 0), _factors(5, 0)),
    ),
    "factorized_fl_moved": Case(
        {},
        moved,
        lambda model: (_factors(1, _HEAD),) * 2,
        training={"batch_size": 12},  # BatchNorm of four examples magnifies rounding
    ),
    "fedavg": Case({}, moved, _without(0)),
    "fedavgm": Case({"beta": 0.5}, moved, _without(0)),
    "fedsam": Case({}, moved, _without(0)),
    "ditto": Case({}, moved_and(near_shared), _without(0)),
    "apfl": Case({"alpha_rate": 0.1}, moved_and(alpha_moves), _without(0)),
    "fedala": Case({"layers": 2, "first_passes": 3}, partly_mixed, _without(0)),
    "fedamp": Case(
        {"sigma": 5.0, "self_weight": 0.3},
        all_of(
            lambda first, last: moved(first.clients, last.clients),
            _matters("fedamp", "penalty", 0.0, 1.0),
        ),
        _without(_NORM // 2),  # parameters only
    ),
    "fedbabu": Case({"epochs": 1}, only_body, _without(_HEAD)),
    "fedcac": Case(
        {"critical_share": 0.5, "alone_after": 20},
        moved_and(lambda last: len(np.unique(last.rows.critical["fc1"]["kernel"], axis=0)) > 2),
        _without(0),
    ),
    # The policy has a layer of 2 d (d + 1) parameters and a LayerNorm of 4 d.
    "fedcp": Case(
        {},
        all_of(moved, _matters("fedcp", "penalty", 0.0, 5.0)),
        _without(-2 * tiny.HIDDEN * (tiny.HIDDEN + 3)),
    ),
    # The mean features go down in every round. Up goes only the mean in the first, then the model.
    "feddbe": Case(
        {"mean_momentum": 0.6},
        all_of(moved, _matters("feddbe", "penalty", 0.0, 50.0)),
        lambda model: (model + 4 * tiny.HIDDEN + 1, {model, 4 * tiny.HIDDEN}),
    ),
    "feddyn": Case({"alpha": 0.5}, moved_and(mean_of_clients("drift", "g")), _without(0)),
    "fedproto": Case(
        {},
        all_of(
            lambda _, last: bool(last.server["seen"].all()),
            _matters("fedproto", "penalty", 0.0, 1.0, result=1),
        ),
        lambda model: (_PROTOTYPES + 3, _PROTOTYPES + 12),
    ),
    "fedtgp": Case(
        {"rate": 0.1, "epochs": 2},
        all_of(
            lambda first, last: moved(first.server["generator"], last.server["generator"]),
            lambda _, last: bool(last.server["seen"].all()),
            _matters("fedtgp", "penalty", 0.0, 1.0, result=1),
        ),
        lambda model: (_PROTOTYPES + 3, _PROTOTYPES + 12),
    ),
    "fedgh": Case(
        {"rate": 0.1},
        moved,
        lambda model: (4 * _HEAD, _PROTOTYPES + 12),
    ),
    "fml": Case(
        {"alpha": 0.6, "beta": 0.7},
        all_of(
            moved,
            _matters("fml", "alpha", 0.6, 0.9, result=1),
            _matters("fml", "beta", 0.7, 0.9),
        ),
        lambda model: (model, model),
    ),
    "fedas": Case(
        {"align_rate": 0.05},
        all_of(
            moved_and(lambda last: np.ptp(_next_round("fedas", last)[0]["fisher"]) > 0),
            _matters("fedas", "align_rate", 0.0, 0.5),
        ),
        lambda model: (model - 4 * _HEAD, model - 4 * _HEAD + 4),  # and one number of Fisher
    ),
    # Download: C and a mask of classes. Upload: C, n, h and V.
    "fedpac": Case(
        {"head_epochs": 2},
        _collaborated,
        lambda model: (model + _PROTOTYPES + 3, model + 2 * _PROTOTYPES + 12 + 4),
    ),
    # Two more heads; down also a centre of three numbers and a radius.
    "floco": Case(
        {"endpoints": 3, "place_after": 2, "radius": 0.5},
        _placed,
        lambda model: (model + 2 * 4 * _HEAD + 16, model + 2 * 4 * _HEAD),
    ),
    # Upload: a mask of classes.
    "flute": Case(
        {"head_epochs": 2},
        all_of(
            lambda first, last: moved(first.rows, last.rows),
            _matters("flute", "collapse", 0.0, 1.0),
            moved,
        ),
        lambda model: (model, model + tiny.CLASSES),
    ),
    "gpfl": Case(
        {"penalty": 0.5},
        all_of(moved, _matters("gpfl", "decay", 0.0, 0.1)),
        lambda model: (model - 4 * _HEAD + _PROTOTYPES + _VALVE,) * 2,
    ),
    "knn_per": Case({"neighbours": 3}, moved, _without(0)),
    "l2gd": Case({"pull": 0.4}, all_of(moved, _matters("l2gd", "pull", 0.0, 1.0)), _without(0)),
    "moon": Case({}, all_of(moved, _matters("moon", "mu", 0.0, 1.0)), _without(0)),
    "fedlc": Case({}, all_of(moved, _matters("fedlc", "tau", 0.0, 1.0)), _without(0)),
    "pfedfda": Case(
        {"ridge": 0.3},
        all_of(moved, _matters("pfedfda", "ridge", 0.1, 3.0, result=1)),
        lambda model: (model - 4 * _HEAD + _PROTOTYPES + 4 * tiny.HIDDEN**2,) * 2,
    ),
    "pfedgraph": Case(
        {"alpha": 0.3, "penalty": 0.5},
        all_of(models_differ, _matters("pfedgraph", "penalty", 0.0, 1.0)),
        _without(0),
    ),
    "fedrod": Case({}, moved, _without(0)),
    # Parameters only: the model and c down, the changes of both up.
    "scaffold": Case(
        {"server_rate": 0.8},
        moved_and(mean_of_clients("control", "control")),
        lambda model: (2 * model - 2 * _NORM,) * 2,
    ),
    # Only parameters are sent: 160 bytes in fc1, 64 in norm1, 108 in fc2; one layer is retained.
    "pfedla": Case(
        {"k": 1, "rate": 0.5},
        moved,
        lambda model: ({172, 268, 224}, model - 2 * _NORM),
    ),
    "fedbn": Case({}, two_parts({"norm1"}), _without(_NORM)),
    "clustered_fl": Case(
        {"mean_below": 10.0, "longest_above": 0.01, "max_clusters": 4},
        split,
        _without(0),
    ),
    # All models down; one model and a number up.
    "ifca": Case(
        {"clusters": 6, "cluster_layers": 1},
        chosen,
        lambda model: (model + 5 * 4 * _HEAD, model + 4),
    ),
    "fedavg_plus": Case({"rate": 0.05}, moved, _without(0)),
    "fedem": Case({"components": 2}, moved_and(mixed), lambda model: (2 * model, 2 * model)),
    "fedprox": Case({"mu": 0.5}, all_of(moved, _matters("fedprox", "mu", 0.0, 1.0)), _without(0)),
    "fedmn": Case({**_POOL, "x_size": 3, "y_size": 2}, routed, lambda model: (_ROUTES,) * 2),
    "fedmn_correlation": Case({**_POOL, "size": 3}, routed, lambda model: (_PATHS | _ONCE, _PATHS)),
    "fedper": Case({}, two_parts({"fc2"}), _without(_HEAD)),
    "fedrep": Case({"head_epochs": 2}, two_parts({"fc2"}), _without(_HEAD)),
    "lg_fedavg": Case({}, two_parts({"fc1", "norm1"}), lambda model: (4 * _HEAD,) * 2),
    "fedfomo": Case(
        {"peers": 2},
        moved_and(_weighed),
        lambda model: (2 * model, model + 2 * 4),  # M weights
    ),
    "local": Case({}, moved, lambda model: (0, 0)),
    # Down both networks; up the descriptor, the change of the parameters and the gradient of one.
    "pefll": Case(
        {"rate": 0.01, "embedding_width": 4, "width": 7, "weight_decay": 0.01, "clip_norm": 1.0},
        all_of(moved, lambda _, last: bool(np.ptp(last.rows.descriptor, 0).min() > 0)),
        lambda model: (4 * (_PSI + _PHI), model - 2 * _NORM + 4 * (_PSI + 2)),
    ),
    "per_fedavg": Case(
        {"variant": "hf", "alpha": 0.05},
        all_of(moved, _matters("per_fedavg", "variant", "hf", "fo")),
        _without(0),
        training={"learning_rate": 0.03},  # long steps magnify rounding through the Hessian
    ),
    # Parameters only, in PC those of fc1 and norm1.
    "pfedhn": Case(
        {"rate": 0.1, "clip_norm": 1.0},
        moved_and(client_layers({"norm1"})),
        _without(_NORM // 2),
        rows_of_absent_move=True,
    ),
    "pfedhn_pc": Case(
        {"rate": 0.1, "spectral_norm": True, "average": True},
        moved_and(client_layers({"norm1", "fc2"})),
        _without(_NORM // 2 + _HEAD),
        rows_of_absent_move=True,
    ),
    "pfedpara": Case(
        {},
        moved_and(lambda last: set(last.clients.personal["params"]["fc1"]) == {"x2", "y2"}),
        lambda model: (4 * (3 * (5 + 8) + _NORM + _HEAD),) * 2,
    ),
    "pfedme": Case({"beta": 0.8}, moved_and(_personalised), _without(0)),
}
FACTORIES: dict[str, Callable[..., Algorithm]] = {
    **{name: method.factory for name, method in algorithms.METHODS.items()},
    # From the page "Your method".
    "fedavgm": documents.module("your_method.md").fedavgm,
    "fedsam": documents.module("your_method.md", 2).fedsam,
}
NAMES = sorted(FACTORIES)
# Seven methods of different structure, for properties that follow from the simulation.
STRUCTURES = ("clustered_fl", "factorized_fl", "fedavg", "fedfomo", "fedmn", "pfedhn_pc", "pfedla")
NOTHING: Mapping[str, Any] = MappingProxyType({})


def make(
    name: str, federation: Federation, settings: Mapping[str, Any] = NOTHING, **changes: Any
) -> Algorithm:
    """Returns a method on the tiny network, with changed settings of the method and of training."""
    case = CASES[name]
    local = training(**{**(case.training or {}), **changes})
    return FACTORIES[name](tiny.Net(), local, federation, **{**case.settings, **settings})


def real(name: str) -> dict[str, float]:
    """Returns a method's real-valued settings, without those that shape its program."""
    settings = {**configuration.factory_settings(FACTORIES[name]), **CASES[name].settings}
    shaping = "gamma" if name == "pfedpara" else "dropout"
    return {k: v for k, v in settings.items() if type(v) is float and k != shaping}


def model_bytes() -> int:
    """Returns the bytes of the tiny network's variables."""
    shapes = jax.eval_shape(tiny.Net().init, jax.random.key(0), jax.numpy.zeros((1, tiny.FEATURES)))
    return sum(trees.bytes_per_layer(shapes).values())
