"""The work on which libraries are compared, and this library's results: nothing is random.

Four clients have thirty of the embedded digits each, from four classes. One hidden layer is trained
by gradient descent on full batches, one step per epoch; all clients take part.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.libraries.methods import EPOCHS, METHODS
from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, randomness, task, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, State
from fedjax_pfl.core.examples import FederatedData, Split, client_data
from fedjax_pfl.networks.normalisation import BatchNorm
from fedjax_pfl.simulation.rounds import make_rounds

CLIENTS, HIDDEN, CLASSES, RATE, ROUNDS = 4, 16, 10, 0.2, 3
Arrays = dict[str, np.ndarray]
TASK = task.classification()
KEY = 0
# PyTorch's names of our leaves; a kernel is transposed.
_PYTORCH_NAMES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


class Net(nn.Module):
    """Network with one hidden layer, with or without BatchNorm."""

    norm: bool = False
    head = "fc2"

    @property
    def layers(self) -> tuple[str, ...]:
        """Returns the names of all layers in order."""
        return ("fc1", *(["bn1"] if self.norm else []), "fc2")

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, mask: Any = None) -> jax.Array:
        x = nn.Dense(HIDDEN, name="fc1")(x)
        x = BatchNorm(name="bn1")(x, train, mask) if self.norm else x
        return nn.Dense(CLASSES, name="fc2")(nn.relu(x))


def work(norm: bool, examples: int = 30) -> Arrays:
    """Returns x [clients, examples, features], y, and the initial parameters as start/NAME."""
    from sklearn.datasets import load_digits

    source = load_digits()
    x, y = (source.data / 16).astype(np.float32), source.target
    rng, xs, ys = np.random.default_rng(0), [], []
    for i in range(CLIENTS):
        indices = rng.choice(np.flatnonzero((y - 2 * i) % CLASSES < 4), examples, replace=False)
        xs.append(x[indices])
        ys.append(y[indices])
    variables = dict(Net(norm).init(jax.random.key(KEY), jnp.zeros((1, x.shape[1]))))
    start = {f"start/{name}": value for name, value in to_pytorch(variables["params"]).items()}
    return {"x": np.stack(xs), "y": np.stack(ys), **start}


def to_pytorch(params: Any) -> Arrays:
    """Returns parameters by PyTorch's names and in its shapes."""
    arrays: Arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *layers, name = (str(entry.key) for entry in path)
        full_name = ".".join([*layers, _PYTORCH_NAMES.get(name, name)])
        arrays[full_name] = np.asarray(leaf).T if name == "kernel" else leaf
    return arrays


def added_parameters(name: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Returns what a method starts from besides the network, as added/NAME."""
    training = local_training.sgd(learning_rate=RATE, batch_size=1, epochs=EPOCHS)
    _, initialised, _, _ = make_method(name, arrays, training)
    server = initialised.init(jax.random.key(KEY)).server
    if name == "floco":
        added = {"points": random_points(METHODS[name].settings["endpoints"])}
    elif name == "pefll":
        added = _generator_parameters(server.embedding, server.hypernetwork, arrays)
    elif name == "pfedfda":
        added = {"means": server["means"]}
    else:
        added = to_pytorch(_server_params(server))
    return {f"added/{n}": np.asarray(v) for n, v in added.items() if f"start/{n}" not in arrays}


def random_points(endpoints: int) -> np.ndarray:
    """Returns the exponential numbers of Floco's points, [rounds, clients, steps, endpoints]."""

    def numbers(t: jax.Array, i: jax.Array, s: jax.Array) -> jax.Array:
        client_key = randomness.stage_key(jax.random.key(KEY), randomness.TRAIN, t, i)
        step_key = jax.random.fold_in(jax.random.split(client_key)[1], s)
        return jax.random.exponential(jax.random.fold_in(step_key, 2), (endpoints,))

    shape = (ROUNDS, CLIENTS, EPOCHS)
    indices = np.indices(shape).reshape(3, -1)
    return np.asarray(jax.vmap(numbers)(*indices)).reshape(*shape, endpoints)


def _generator_parameters(
    embedding: Any, hypernetwork: Any, arrays: Mapping[str, np.ndarray]
) -> Arrays:
    """Returns PeFLL's parameters so that its heads generate the arrays of `to_pytorch`."""
    added = to_pytorch({"embedding": embedding})
    for name, value in to_pytorch(hypernetwork).items():
        head, kind, leaf = name.partition("_kernel.")
        if kind:  # a head of in * out outputs, in the order of a kernel
            outputs, inputs = arrays[f"start/{head.removeprefix('head_')}.weight"].shape
            value = np.reshape(value, (inputs, outputs, -1)).swapaxes(0, 1)
            value = value.reshape((outputs * inputs, -1) if leaf == "weight" else -1)
            name = f"{head}_weight.{leaf}"
        added[f"hypernetwork.{name}"] = value
    return added


def params(arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the initial parameters of the work as our tree; the inverse of `to_pytorch`."""
    tree: dict[str, dict[str, jax.Array]] = {}
    for key, value in arrays.items():
        if key.startswith("start/"):
            layer, leaf = key[6:].split(".")
            names = {"bias": "bias", "weight": "kernel" if value.ndim == 2 else "scale"}
            tree.setdefault(layer, {})[names[leaf]] = jnp.asarray(value.T)
    return tree


def _federated(arrays: Mapping[str, np.ndarray]) -> tuple[FederatedData, Federation]:
    """Returns the examples of the work as a federation, with test examples if it has some."""
    clients, features = arrays["y"].shape[0], arrays["x"].shape[-1]
    prefixes = ("", "test_") if "test_x" in arrays else ("",)
    x = np.concatenate([arrays[f"{p}x"].reshape(-1, features) for p in prefixes])
    y = np.concatenate([arrays[f"{p}y"].reshape(-1) for p in prefixes]).astype(np.int32)
    splits, first = [], 0
    for prefix in prefixes:
        rows = first + np.arange(arrays[f"{prefix}y"].size, dtype=np.int32).reshape(clients, -1)
        splits.append(Split(rows, np.full(clients, rows.shape[1], np.int32)))
        first += rows.size
    no_rows = Split(splits[0].rows[:, :0], np.zeros(clients, np.int32))
    data = jax.device_put(FederatedData(x, y, splits[0], no_rows, splits[-1]))
    counts, groups = splits[0].size, np.zeros(clients, np.int32)
    return data, Federation(counts, (features,), CLASSES, np.ones(clients, bool), groups, task=TASK)


def rounds(name: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Returns our parameters after each round, named as in the adapters of other libraries.

    Names are ROUND/server/NAME and ROUND/CLIENT/NAME; round 0 is the start.
    """
    batch = arrays["y"].shape[1]
    training = local_training.sgd(learning_rate=RATE, batch_size=batch, epochs=EPOCHS)
    algorithm, initialised, data, federation = make_method(name, arrays, training)
    compiled_rounds = make_rounds(
        initialised, federation, cohort=CLIENTS, max_rounds=1, evaluate_after=False
    )
    results: Arrays = {}
    key = jax.random.key(KEY)
    state = compiled_rounds.init(key)
    first, last = METHODS[name].first_rounds, METHODS[name].first_rounds + ROUNDS
    for t in range(last + 1):
        if t >= first:
            host_state = jax.device_get(state)
            results |= {
                f"{t - first}/{part}": value
                for part, value in _parameters(name, algorithm, host_state, data).items()
            }
        if t < last:
            state, _ = compiled_rounds.run(
                key, compiled_rounds.place(state), data, jnp.int32(t), jnp.int32(1)
            )
    return results


def make_method(
    name: str, arrays: Mapping[str, np.ndarray], training: local_training.Training
) -> tuple[Algorithm, Algorithm, FederatedData, Federation]:
    """Returns a method, the same method with the work's initial parameters, and its data."""
    method = METHODS[name]
    data, federation = _federated(arrays)
    algorithm = getattr(algorithms, name)(Net(method.norm), training, federation, **method.settings)
    variables = dict(Net(method.norm).init(jax.random.key(KEY), federation.examples()))
    # PeFLL generates the network, so its own random networks are the start.
    start = None if name == "pefll" else State({**variables, "params": params(arrays)}, (), ())
    initialised = algorithm._replace(
        init=lambda _key, _=None: algorithm.init(jax.random.key(KEY), start)
    )
    return algorithm, initialised, data, federation


def _parameters(name: str, algorithm: Algorithm, state: State, data: FederatedData) -> Arrays:
    """Returns the parameters of server and clients by name."""
    arrays: Arrays = {}
    trees_by_prefix = {"": _server_params(state.server)}
    if name == "scaffold":
        trees_by_prefix["control."] = state.server["control"]
    for prefix, tree in trees_by_prefix.items():
        arrays |= {f"server/{prefix}{n}": value for n, value in to_pytorch(tree).items()}
    for i in range(CLIENTS):
        client = trees.row(state.clients, i)
        for prefix, tree in _client_trees(name, algorithm, state, client, data, i).items():
            arrays |= {f"{i}/{prefix}{n}": value for n, value in to_pytorch(tree).items()}
    return arrays


def _server_params(server: Any) -> Any:
    """Returns the network's parameters that a server stores; {} if it stores none."""
    variables = getattr(server, "variables", server)
    return variables.get("params", {}) if isinstance(variables, dict) else {}


def _client_trees(
    name: str, algorithm: Algorithm, state: State, client: Any, data: FederatedData, i: int
) -> dict[str, Any]:
    """Returns parameter trees of a client by prefix."""
    if name == "scaffold":
        return {"control.": client.control}
    if name == "fedbabu":  # discards fine-tuning for an evaluation
        return {"": trees.join(state.server, client.personal)["params"]}
    if name == "fedrod":
        return {"": state.server["params"], "own.": client.head}
    ctx = ClientContext(
        jnp.int32(i), client_data(data, jnp.int32(i)), jnp.int32(0), jax.random.key(KEY)
    )
    server_state = state._replace(clients=())
    served = jax.jit(algorithm.personalize)(server_state, client, ctx)
    client_trees = {"": served["params"]}
    if name == "fedcp":
        client_trees["own."] = served["personal_head"]["params"]
    if name == "feddbe":
        client_trees["own."] = {"bias": served["feature_bias"]}
    return client_trees
