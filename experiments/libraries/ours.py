"""The work that libraries are compared on, and ours on it: full batches, so that nothing is random.

Four clients with thirty of the embedded digits each, from four classes; one hidden layer; plain
gradient descent for some epochs, of which each is one step; everybody takes part.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.libraries.methods import EPOCHS, METHODS
from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, task, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, State
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.networks.normalisation import batch_norm
from fedjax_pfl.simulation.rounds import make_rounds

CLIENTS, HIDDEN, CLASSES, RATE, ROUNDS = 4, 16, 10, 0.2, 3
Arrays = dict[str, np.ndarray]
JUDGED = task.classification()
KEY = 0
# Of ours, by their name in PyTorch; a kernel is turned over.
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


class Net(nn.Module):
    """One hidden layer, with BatchNorm or without."""

    norm: bool = False
    head = "fc2"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, in their order."""
        return ("fc1", *(["bn1"] if self.norm else []), "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        x = nn.Dense(HIDDEN, name="fc1")(x)
        x = batch_norm(x, train, mask, "bn1") if self.norm else x
        return nn.Dense(CLASSES, name="fc2")(nn.relu(x))


def work(norm: bool, examples: int = 30) -> Arrays:
    """x [clients, examples, features], y, and the parameters that all start from, as start/NAME."""
    from sklearn.datasets import load_digits

    source = load_digits()
    x, y = (source.data / 16).astype(np.float32), source.target
    rng, xs, ys = np.random.default_rng(0), [], []
    for i in range(CLIENTS):
        own = rng.choice(np.flatnonzero((y - 2 * i) % CLASSES < 4), examples, replace=False)
        xs.append(x[own])
        ys.append(y[own])
    first = dict(Net(norm).init(jax.random.key(KEY), jnp.zeros((1, x.shape[1]))))
    start = {f"start/{name}": value for name, value in named(first["params"]).items()}
    return {"x": np.stack(xs), "y": np.stack(ys), **start}


def named(params: Any) -> Arrays:
    """Parameters by their names in PyTorch, with its shapes."""
    found: Arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        layer, name = (str(entry.key) for entry in path)
        found[f"{layer}.{_LEAVES[name]}"] = np.asarray(leaf).T if name == "kernel" else leaf
    return found


def params(given: Mapping[str, np.ndarray]) -> Any:
    """The parameters of the work in our form: the inverse of `named`."""
    found: dict[str, dict[str, jax.Array]] = {}
    for whole, value in given.items():
        if whole.startswith("start/"):
            layer, leaf = whole[6:].split(".")
            names = {"bias": "bias", "weight": "kernel" if value.ndim == 2 else "scale"}
            found.setdefault(layer, {})[names[leaf]] = jnp.asarray(value.T)
    return found


def _federated(given: Mapping[str, np.ndarray]) -> tuple[FederatedData, Federation]:
    """Of train examples, and of test examples where there are some."""
    clients, features = given["y"].shape[0], given["x"].shape[-1]
    prefixes = ("", "test_") if "test_x" in given else ("",)
    x = np.concatenate([given[f"{p}x"].reshape(-1, features) for p in prefixes])
    y = np.concatenate([given[f"{p}y"].reshape(-1) for p in prefixes]).astype(np.int32)
    splits, first = [], 0
    for prefix in prefixes:
        rows = first + np.arange(given[f"{prefix}y"].size, dtype=np.int32).reshape(clients, -1)
        splits.append(Split(rows, np.full(clients, rows.shape[1], np.int32)))
        first += rows.size
    none = Split(splits[0].rows[:, :0], np.zeros(clients, np.int32))
    data = jax.device_put(FederatedData(x, y, splits[0], none, splits[-1]))
    counts, groups = splits[0].size, np.zeros(clients, np.int32)
    return data, Federation(
        counts, (features,), CLASSES, np.ones(clients, bool), groups, task=JUDGED
    )


def rounds(name: str, given: Mapping[str, np.ndarray]) -> Arrays:
    """Our parameters after each round, called as the adapters call theirs.

    They are ROUND/server/NAME and ROUND/CLIENT/NAME; round 0 is the start.
    """
    batch = given["y"].shape[1]
    training = local_training.sgd(learning_rate=RATE, batch_size=batch, epochs=EPOCHS)
    plain, begun, data, federation = made(name, given, training)
    engine = make_rounds(begun, federation, cohort=CLIENTS, max_rounds=1, evaluate_after=False)
    found: Arrays = {}
    key = jax.random.key(KEY)
    state = engine.init(key)
    for t in range(ROUNDS + 1):
        now = jax.device_get(state)
        found |= {f"{t}/{part}": value for part, value in _seen(name, plain, now, data).items()}
        if t < ROUNDS:
            state, _ = engine.run(key, engine.place(state), data, jnp.int32(t), jnp.int32(1))
    return found


def made(
    name: str, given: Mapping[str, np.ndarray], training: local_training.Training
) -> tuple[Algorithm, Algorithm, FederatedData, Federation]:
    """A method, and the same one that begins with the parameters of the work."""
    method = METHODS[name]
    data, federation = _federated(given)
    plain = getattr(algorithms, name)(Net(method.norm), training, federation, **method.ours)
    first = dict(Net(method.norm).init(jax.random.key(KEY), federation.examples()))
    start = State({**first, "params": params(given)}, (), ())
    begun = plain._replace(init=lambda key, _=None: plain.init(key, start))
    return plain, begun, data, federation


def _seen(name: str, made: Algorithm, state: State, data: FederatedData) -> Arrays:
    """What server and clients have."""
    found: Arrays = {}
    server = state.server if isinstance(state.server, dict) else {}
    shown = {"": server.get("params", {})}
    if name == "scaffold":
        shown["control."] = server["control"]
    for prefix, tree in shown.items():
        found |= {f"server/{prefix}{n}": value for n, value in named(tree).items()}
    for i in range(CLIENTS):
        client = trees.row(state.clients, i)
        for prefix, tree in _of_client(name, made, state, client, data, i).items():
            found |= {f"{i}/{prefix}{n}": value for n, value in named(tree).items()}
    return found


def _of_client(
    name: str, made: Algorithm, state: State, client: Any, data: FederatedData, i: int
) -> dict[str, Any]:
    if name == "scaffold":
        return {"control.": client.own}
    if name == "fedbabu":  # what is tuned for an evaluation is discarded
        return {"": trees.join(state.server, client.own)["params"]}
    if name == "fedrod":
        return {"": state.server["params"], "own.": client.own}
    ctx = ClientContext(
        jnp.int32(i), client_data(data, jnp.int32(i)), jnp.int32(0), jax.random.key(KEY)
    )
    seen = state._replace(clients=())
    return {"": jax.jit(made.personalize)(seen, client, ctx)["params"]}
