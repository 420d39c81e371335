"""For each algorithm a tiny configuration in which its interesting branch fires."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedpac import mixtures
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, State
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.core.task import classification
from fedjax_pfl.settings import configuration
from fedjax_pfl.testing.example import training
from tests import documents, tiny

TASK = classification()


class Case(NamedTuple):
    """An algorithm's own settings, and what must be true of a state after four rounds of them."""

    settings: dict[str, Any]
    fired: Callable[[State, State], bool]  # (first state, last state)
    # From the model's bytes those of one visit, down and up; a set where it may be one of several.
    bytes_per_visit: Callable[[int], tuple[int | set[int], int | set[int]]]
    rows_of_absent_move: bool = False  # pFedHN's momentum and decay of v, and nothing else
    training: dict[str, Any] | None = None  # in place of `training`'s settings


def _moved(first: Any, last: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)
    return all(bool((a != b).any()) for a, b in pairs)


def _two_parts(own: set[str]) -> Callable[[State, State], bool]:
    """Both parts moved, the named layers are each client's own, and the server has the others."""

    def fired(first: State, last: State) -> bool:
        stays, shared = last.clients.personal, last.server
        apart = [bool((leaf[0] != leaf[1]).any()) for leaf in jax.tree.leaves(stays)]
        everywhere = set(trees.layers(stays)) == own and not own & set(trees.layers(shared))
        return everywhere and all(apart) and _moved(first, last)

    return fired


def _both(parameters: int) -> tuple[int, int]:
    return 4 * parameters, 4 * parameters


def _visits(name: str, state: State, **changes: Any) -> tuple[Any, Any]:
    """(uploads, trained) of every client's next visit, stacked, if it had these other settings."""
    data, federation = tiny.federated()
    settings = {**CASES[name].settings, **changes}
    made = getattr(algorithms, name)(tiny.Net(), training(), federation, **settings)
    key, t = jax.random.key(1), jnp.int32(4)

    def ctx(state: State, i: jax.Array) -> tuple[Any, Any]:
        payload = made.send(state, ClientContext(i, None, t, key))
        client = trees.row(state.clients, i)
        return made.train(payload, client, ClientContext(i, client_data(data, i), t, key))[:2]

    return jax.device_get(jax.jit(jax.vmap(ctx, (None, 0)))(state, jnp.arange(tiny.CLIENTS)))


def _params_differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one["params"]), jax.tree.leaves(other["params"]), strict=True)
    return sum(float(np.sum(np.square(np.subtract(a, b)))) for a, b in pairs) > 1e-6


def _curved(first: State, last: State) -> bool:
    """HF takes another direction than FO does."""
    (hf, _), (fo, _) = (_visits("per_fedavg", last, variant=v) for v in ("hf", "fo"))
    return _moved(first, last) and _params_differ(hf, fo)


def _personalised(first: State, last: State) -> bool:
    """θ is not w."""
    return _moved(first, last) and _params_differ(*_visits("pfedme", last))


def _weighed(first: State, last: State) -> bool:
    """One peer has no share in a mixture, and one has some."""
    share = np.maximum(_visits("fedfomo", last)[0]["weights"], 0.0)
    return _moved(first, last) and bool((share == 0).any() and (share > 0).any())


def _generated(own: set[str]) -> Callable[[State, State], bool]:
    """Everything moved: φ, v, their momentum, and what stays at home, which is what it should."""

    def fired(first: State, last: State) -> bool:
        home = last.clients.personal
        return set(trees.layers(home)) == own and _moved(first, last)

    return fired


def _matched(first: State, last: State) -> bool:
    """Some clients are mixed and others not, and some entries of μ are pruned and others not."""
    made = algorithms.factorized_fl(
        tiny.Net(), training(), tiny.federated()[1], **CASES["factorized_fl"].settings
    )
    seen = jax.device_get(jax.jit(made.observe)(last))
    some = bool((seen["weights"] == 0).any() and ((seen["weights"] > 0).sum(1) > 1).any())
    pruned = seen["zeros_in_mu"]
    return some and bool((pruned > 0).all() and (pruned < 1).all()) and _moved(first, last)


def _two_factors(first: State, last: State) -> bool:
    """Of the factors one pair is each client's own."""
    stays = last.clients.personal["params"]["fc1"]
    return set(stays) == {"x2", "y2"} and _moved(first, last)


def _routed(first: State, last: State) -> bool:
    """Blocks are on the paths of some clients only, each on somebody's, and the router moved."""
    active = jax.jit(jax.vmap(lambda gates: router.active(gates, _LAYOUT, trimmed=True)))
    used = jax.device_get(active(last.clients.gates))
    gates = [trees.split(state.server["params"], {"router_gates"})[0] for state in (first, last)]
    return _moved(*gates) and not bool(used.all()) and bool(used.any(0).all())


def _held(first: State, last: State) -> bool:
    """The penalty changes the step."""
    one, other = (_visits("fedprox", last, mu=mu)[0] for mu in (0.0, 1.0))
    return _moved(first, last) and _params_differ(one, other)


def _split(first: State, last: State) -> bool:
    """Some clients are in other clusters, with other models; two places are left."""
    used = int(last.server.used)
    one, other = (trees.row(last.server.models, c) for c in (0, used - 1))
    return set(last.rows.tolist()) == set(range(used)) and used > 1 and _params_differ(one, other)


def _mixed(first: State, last: State) -> bool:
    """Clients weigh the components differently, and those differ."""
    one, other = (trees.row(last.server, m) for m in (0, 1))
    apart = np.std(last.clients.pi, 0).min() > 1e-3
    return _moved(first, last) and bool(apart) and _params_differ(one, other)


def _apart_from_the_shared(first: State, last: State) -> bool:
    """Everybody's own model is near the shared one and another."""
    shared = jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (tiny.CLIENTS, *leaf.shape)), last.server
    )
    return _moved(first, last) and _params_differ(last.clients.variables, shared)


def _shares_move(first: State, last: State) -> bool:
    """α differs between clients, and nobody's is at an end."""
    alpha = np.asarray(last.clients.alpha)
    return _moved(first, last) and bool(np.unique(alpha).size > 1 and (alpha > 0).all())


def _taken_in(first: State, last: State) -> bool:
    """Of some numbers a part is taken in, and of others all."""
    weights = np.concatenate([w.ravel() for w in jax.tree.leaves(last.clients.mixing.weights)])
    part, learned = (weights < 1) & (weights > 0), np.asarray(last.clients.mixing.learned)
    return bool(part.any() and (weights == 1).any() and learned.any())


def _attended(first: State, last: State) -> bool:
    """Models differ, and being held changes them."""
    one, other = (_visits("fedamp", last, penalty=penalty)[0] for penalty in (0.0, 1.0))
    return _moved(first.clients, last.clients) and _params_differ(one, other)


def _body_alone(first: State, last: State) -> bool:
    """The head is as it was drawn, and the body is not."""
    own = [jax.tree.leaves(state.clients.personal) for state in (first, last)]
    heads = zip(*own, strict=True)
    stays = set(trees.layers(last.clients.personal)) == {"fc2"}
    still = all((a == b).all() for a, b in heads)
    parts = [(state.server, state.clients.momentum) for state in (first, last)]
    return stays and still and _moved(*parts)


def _mean_of_clients(name: str, field: str) -> Callable[[State, State], bool]:
    """What the server keeps is the mean of what the clients have, whoever dropped out."""

    def fired(first: State, last: State) -> bool:
        kept, own = last.server[name], getattr(last.clients, field)
        pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(own), strict=True)
        same = [np.allclose(a, np.mean(b, 0), rtol=1e-4, atol=1e-6) for a, b in pairs]
        return all(same) and _moved(first, last)

    return fired


def _prototypes(first: State, last: State) -> bool:
    """Each class has one, and they hold the models."""
    one, other = (_visits("fedproto", last, penalty=penalty)[1] for penalty in (0.0, 1.0))
    return bool(last.server["seen"].all()) and _params_differ(one, other)


def _pulled(first: State, last: State) -> bool:
    """Clients' models differ, and pulling changes where they go."""
    one, other = (_visits("l2gd", last, pull=pull)[0] for pull in (0.0, 1.0))
    return _moved(first, last) and _params_differ(one, other)


def _aligned(first: State, last: State) -> bool:
    """Alignment changes the step, and clients' weights are not alike."""
    one, other = (_visits("fedas", last, align_rate=rate)[0] for rate in (0.0, 0.5))
    return _moved(first, last) and _params_differ(one, other) and bool(np.ptp(one["fisher"]) > 0)


def _collaborated(first: State, last: State) -> bool:
    """Clients have heads of their own, of which some are mixed, and each class has a prototype."""
    mine, more = last.rows["params"]["fc2"]["kernel"], _visits("fedpac", last)[0]
    a = np.asarray(mixtures(more["h"], more["variance"], jnp.ones(tiny.CLIENTS, bool)))
    some = bool(((a > 0.01) & (a < 0.99)).any() and (a < 1e-6).any())
    return some and bool((mine[0] != mine[1]).any() and last.server["seen"].all())


def _by_graph(first: State, last: State) -> bool:
    """What clients are sent is not one model, and its direction holds them."""
    one, other = (_visits("pfedgraph", last, penalty=penalty)[0] for penalty in (0.0, 1.0))
    rows = (trees.row(last.rows, i) for i in (0, 1))
    return _moved(first.rows, last.rows) and _params_differ(*rows) and _params_differ(one, other)


_LAYOUT = (1, 2, 2)
_POOL = {"layout": _LAYOUT, "width": 4, "hidden": 5, "dropout": 0.2}
# Encoder, φx and router, or encoder and the router's gates; then one or two blocks in either layer.
_ALWAYS, _LIGHT = (108 + 99) + 4 * 2 + 6 * 8, 108 + 4 * 8 + (3 + 9 + 3)
_BLOCKS = (25 + 18, 25 + 36, 50 + 18, 50 + 36)
_ROUTES, _PATHS = ({4 * (size + blocks) for blocks in _BLOCKS} for size in (_ALWAYS, _LIGHT))
_ONCE = {size + 4 * (99 + 9) for size in _PATHS}  # φx and φy with a client's first visit
_NORM = 4 * tiny.HIDDEN  # scale, bias, mean and variance
_HEAD = (tiny.HIDDEN + 1) * tiny.CLASSES
_PROTOTYPES = 4 * tiny.CLASSES * tiny.HIDDEN


def _factors(rank: int, head: int) -> set[int]:
    """Possible bytes: u and v, BatchNorm's scale and shift, the head, nonzero entries of μ."""
    fixed = rank * (tiny.FEATURES + tiny.HIDDEN) + _NORM // 2 + head
    return {4 * (fixed + entries) for entries in range(tiny.FEATURES * tiny.HIDDEN + 1)}


CASES = {
    "factorized_fl": Case(
        {"tau": 0.9999, "minimum": 2, "sparsity": 0.02, "rank": 5},
        _matched,
        lambda model: (_factors(5, 0), _factors(5, 0)),
        # With a low rank and long steps a feature may come to next to nothing, and there
        # BatchNorm blows up rounding beyond what the contract allows.
        training={"learning_rate": 0.03},
    ),
    "factorized_fl_moved": Case({}, _moved, lambda model: (_factors(1, _HEAD),) * 2),
    "fedavg": Case({}, _moved, lambda model: (model, model)),
    "fedavgm": Case({"beta": 0.5}, _moved, lambda model: (model, model)),
    "fedsam": Case({}, _moved, lambda model: (model, model)),
    "ditto": Case({}, _apart_from_the_shared, lambda model: (model, model)),
    "apfl": Case({"alpha_rate": 0.1}, _shares_move, lambda model: (model, model)),
    "fedala": Case({"layers": 2, "first_passes": 3}, _taken_in, lambda model: (model, model)),
    "fedamp": Case(
        {"sigma": 5.0, "self_weight": 0.3},
        _attended,
        lambda model: _both(model // 4 - _NORM // 2),  # parameters alone
        # Shorter steps, as above: a mixture of models hands rounding on from client to client.
        training={"learning_rate": 0.03},
    ),
    "fedbabu": Case({"epochs": 1}, _body_alone, lambda model: _both(model // 4 - _HEAD)),
    "feddyn": Case({"alpha": 0.5}, _mean_of_clients("drift", "g"), lambda model: (model, model)),
    "fedproto": Case({}, _prototypes, lambda model: (_PROTOTYPES + 3, _PROTOTYPES + 12)),
    "fedas": Case(
        {"align_rate": 0.05},
        _aligned,
        lambda model: (model - 4 * _HEAD, model - 4 * _HEAD + 4),  # Fisher, one number
        # Shorter steps, as above: what is a squared gradient to one program may round to another.
        training={"learning_rate": 0.03},
    ),
    # C and which there are come down; C, n, h and V go up
    "fedpac": Case(
        {"head_epochs": 2},
        _collaborated,
        lambda model: (model + _PROTOTYPES + 3, model + 2 * _PROTOTYPES + 12 + 4),
        training={"learning_rate": 0.03},
    ),
    "l2gd": Case({"pull": 0.4}, _pulled, lambda model: (model, model)),
    "pfedgraph": Case(
        {"alpha": 0.3, "penalty": 0.5},
        _by_graph,
        lambda model: (model, model),
        training={"learning_rate": 0.03},
    ),
    "fedrod": Case({}, _moved, lambda model: (model, model)),
    # c comes down beside the model, and a change of c_i goes up: parameters alone
    "scaffold": Case(
        {"server_rate": 0.8},
        _mean_of_clients("control", "control"),
        lambda model: _both(2 * (model // 4) - _NORM // 2),
    ),
    # Only parameters are sent: 160 bytes in fc1, 64 in norm1, 108 in fc2; one layer is retained.
    # Shorter steps, as above: after long ones BatchNorm blows up the rounding of two programs.
    "pfedla": Case(
        {"k": 1, "rate": 0.5},
        _moved,
        lambda model: ({172, 268, 224}, model - 2 * _NORM),
        training={"learning_rate": 0.03},
    ),
    "fedbn": Case({}, _two_parts({"norm1"}), lambda model: _both(model // 4 - _NORM)),
    "clustered_fl": Case(
        {"mean_below": 10.0, "longest_above": 0.01, "max_clusters": 4},
        _split,
        lambda model: (model, model),
    ),
    "fedavg_plus": Case({"rate": 0.05}, _moved, lambda model: (model, model)),
    "fedem": Case({"components": 2}, _mixed, lambda model: (2 * model, 2 * model)),
    "fedprox": Case({"mu": 0.5}, _held, lambda model: (model, model)),
    "fedmn": Case({**_POOL, "x_size": 3, "y_size": 2}, _routed, lambda model: (_ROUTES,) * 2),
    "fedmn_correlation": Case(
        {**_POOL, "size": 3}, _routed, lambda model: (_PATHS | _ONCE, _PATHS)
    ),
    "fedper": Case({}, _two_parts({"fc2"}), lambda model: _both(model // 4 - _HEAD)),
    "fedrep": Case(
        {"head_epochs": 2}, _two_parts({"fc2"}), lambda model: _both(model // 4 - _HEAD)
    ),
    "lg_fedavg": Case({}, _two_parts({"fc1", "norm1"}), lambda model: _both(_HEAD)),
    "fedfomo": Case(
        {"peers": 2},
        _weighed,
        lambda model: (2 * model, model + 2 * 4),  # M weights
    ),
    "local": Case({}, _moved, lambda model: (0, 0)),
    "per_fedavg": Case({"variant": "hf", "alpha": 0.05}, _curved, lambda model: (model, model)),
    # Parameters alone travel, and in PC those of fc1 and norm1.
    "pfedhn": Case(
        {"rate": 0.1, "clip_norm": 1.0},
        _generated({"norm1"}),
        lambda model: _both(model // 4 - _NORM // 2),
        rows_of_absent_move=True,
    ),
    "pfedhn_pc": Case(
        {"rate": 0.1, "spectral_norm": True, "average": True},
        _generated({"norm1", "fc2"}),
        lambda model: _both(model // 4 - _NORM // 2 - _HEAD),
        rows_of_absent_move=True,
    ),
    "pfedpara": Case({}, _two_factors, lambda model: _both(3 * (5 + 8) + _NORM + _HEAD)),
    "pfedme": Case({"beta": 0.8}, _personalised, lambda model: (model, model)),
}
FACTORIES: dict[str, Callable[..., Algorithm]] = {
    **{name: method.factory for name, method in algorithms.METHODS.items()},
    # As a reader writes them.
    "fedavgm": documents.module("your_method.md").fedavgm,
    "fedsam": documents.module("your_method.md", 2).fedsam,
}
NAMES = sorted(FACTORIES)
# Seven that differ in structure: what follows from the simulation alone need not be asked of more.
STRUCTURES = ("clustered_fl", "factorized_fl", "fedavg", "fedfomo", "fedmn", "pfedhn_pc", "pfedla")
NOTHING: Mapping[str, Any] = MappingProxyType({})


def make(
    name: str, federation: Federation, own: Mapping[str, Any] = NOTHING, **changes: Any
) -> Algorithm:
    """An algorithm on the tiny network, with these settings of its own and of its training."""
    case = CASES[name]
    trained = training(**{**(case.training or {}), **changes})
    return FACTORIES[name](tiny.Net(), trained, federation, **{**case.settings, **own})


def real(name: str) -> dict[str, float]:
    """An algorithm's real-valued settings; not those that shape its program, which say so."""
    settings = {**configuration.factory_settings(FACTORIES[name]), **CASES[name].settings}
    shaping = "gamma" if name == "pfedpara" else "dropout"
    return {k: v for k, v in settings.items() if type(v) is float and k != shaping}


def model_bytes() -> int:
    """Bytes of the tiny network's variables."""
    shapes = jax.eval_shape(tiny.Net().init, jax.random.key(0), jax.numpy.zeros((1, tiny.FEATURES)))
    return sum(trees.bytes_per_layer(shapes).values())
