"""Clients' personal models as files, and back: a `.safetensors` for each client.

A file holds the variables that the client is served, by names such as params/conv1/kernel, and
beside them in plain text what is needed to use them. What a method predicts with is a network and
its settings, of which only the name and the settings are written; nothing in a file is executed.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from fedjax_pfl.algorithms.fedem import Mixture
from fedjax_pfl.algorithms.fedmn.modular import Modular, Routed
from fedjax_pfl.algorithms.fedproto import Nearest
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import group_algorithms, wrap_clients
from fedjax_pfl.core.randomness import PERSONAL, stage_key
from fedjax_pfl.data import ClientData, client_data
from fedjax_pfl.networks import MODELS
from fedjax_pfl.networks.factorized import Factorized, Hadamard, SplitKernels
from fedjax_pfl.networks.user_defined import UserNetwork
from fedjax_pfl.report import run_reader
from fedjax_pfl.runs import checkpoints, run_directory, runner
from fedjax_pfl.runs.build import build, described
from fedjax_pfl.runs.resume import restore, state_templates
from fedjax_pfl.runs.run_state import client_table
from fedjax_pfl.settings import configuration, custom
from fedjax_pfl.settings.general import settings_with
from fedjax_pfl.simulation.offloaded_rows import OffloadedRows
from fedjax_pfl.simulation.stores import ClientStore

_KEY = "fedjax_pfl"  # of the metadata; one key, because their order is not fixed
_FORMAT = 1
NETWORKS: dict[str, Callable[..., Any]] = {
    **MODELS,
    "factorized": Factorized,
    "hadamard": Hadamard,
    "mixture": Mixture,
    "modular": Modular,
    "nearest": Nearest,
    "routed": Routed,
    "split_kernels": SplitKernels,
}


def restored(
    directory: str | Path,
    *,
    data_dir: str | None = None,
    **brought: Unpack[custom.UserComponents],
) -> runner.Result:
    """What a finished run was left with, from its last checkpoint. Nothing is trained or written.

    Args:
      data_dir: where prepared datasets are, if not where the run's configuration says.
      brought: what was given to `run`: dataset, algorithm, model and so on.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        inside = sorted(directory.glob("*/config.json"))
        hint = f"; there are {len(inside)} in it, such as {inside[0].parent}" if inside else ""
        raise UsageError(f"{directory} is not a run directory: it has no config.json{hint}")
    config: dict[str, Any] = _tuples(run_reader.read_config(directory))
    try:
        phases: tuple[dict[str, Any], ...] = config["phases"] or ({},)
        last = sum(phase.get("rounds", config["rounds"]) for phase in phases)
    except (TypeError, KeyError):
        raise UsageError(f"{directory / 'config.json'} is damaged: it has no rounds") from None
    if not (directory / "report.html").is_file():
        raise UsageError(f"{directory} has not finished; give its command again, which ends it")
    _check_brought(directory, config, phases, brought)
    if config.get("deployed"):
        raise UsageError(
            f"{directory} is of a run that was deployed: each client has its own model on its own "
            "machine, and the server has none"
        )
    folder = directory / "checkpoints"
    if not (folder / str(last)).is_dir():
        raise UsageError(f"{directory} has no checkpoint of its last round, {last}")
    here = {k: v for k, v in config.items() if k not in settings_with("resumable")}
    here["store"] = config.get("store", "device")  # what does not fit on a device still does not
    here["data_dir"] = data_dir or config.get("data_dir")
    words, here = custom.register(here, **brought)
    settings = configuration.complete(here, words)
    built = build(settings, words=words, plans=run_directory.read_plans(directory))
    run_directory.check_examples(directory, described(built))
    store = checkpoints.open_store(folder, only_read=True)
    resolved = json.loads(json.dumps(configuration.resolve(settings, words)))
    try:
        at, state, best = restore(built, store, state_templates(built), last, resolved)
    except checkpoints.DamagedError as error:
        raise UsageError(
            f"{directory}: the checkpoint of round {last} is damaged: {error}; give the run's "
            "command again, which makes it anew"
        ) from None
    return runner.Result(
        config=resolved,
        metrics=list(at.metrics),
        clients=client_table(built, at),
        ledger=at.ledger,
        state=state,
        best=best,
        phases=built.phases,
        data=built.data,
        federation=built.federation,
        directory=directory,
        observations=run_directory.read_observations(directory, last, only_read=True),
        resumed_at=last,
    )


def _check_brought(directory: Path, config: Any, phases: Any, brought: Any) -> None:
    """UsageError where a run had something that is not ours and is not given."""
    for kind, ours in configuration.BUILTINS._asdict().items():
        # A run from before there was such a setting has none.
        usual = configuration.component_name(config, kind) if kind in config else None
        names = {str(name) for name in (usual, *(p.get(kind, usual) for p in phases)) if name}
        if brought.get(kind) is None and (own := sorted(names - set(ours))):
            article = "an" if kind[0] in "aeiou" else "a"
            raise UsageError(
                f"{directory} was run with {article} {kind} of your own, {own[0]}; from Python, "
                f"fedjax_pfl.runs.export.restored(..., {kind}=...) takes it"
            )


def write(
    result: runner.Result,
    folder: str | Path,
    clients: Sequence[int] | None = None,
    *,
    best: bool = False,
) -> list[Path]:
    """A file for each client (or for these), client-0.safetensors and so on, in a new folder.

    Args:
      best: the models of the round that was best on validation examples, not of the last.
    """
    folder = Path(folder)
    check(folder)
    ids = _ids(result, clients)
    t, state = _state(result, best)
    algorithm = result.phases[-1].algorithm
    about = Described(
        result.phases[-1].config.algorithm,
        result.config["dataset"],
        result.config["seed"],
        result.federation,
    )
    each = group_algorithms(algorithm)
    for member in each:
        _network(member, about)
    paths = []
    for i, variables in personalize(result, state, t, ids):
        one = client_data(result.data, np.asarray(i))
        content = packed(about, each[int(result.federation.groups[i])], i, t, one, variables)
        paths.append(folder / f"client-{i}.safetensors")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths[-1].write_bytes(content)
        except OSError as error:
            raise UsageError(f"{paths[-1]} cannot be written ({error.strerror})") from None
    return paths


class Described(NamedTuple):
    """What all models of a run have in common, for their files."""

    algorithm: str
    dataset: str
    seed: int
    federation: Federation


def packed(
    about: Described, member: Algorithm, i: int, t: int, data: ClientData, variables: PyTree
) -> bytes:
    """The content of a client's file.

    Args:
      member: the algorithm of the client's group.
      t: after how many rounds.
      data: the client's.
    """
    facts = {
        "format": _FORMAT,
        "algorithm": about.algorithm,
        "dataset": about.dataset,
        "model": _network(member, about),
        "client": i,
        "round": t,
        "seed": about.seed,
        "input_shape": list(about.federation.input_shape),
        "input_dtype": about.federation.input_dtype,
        "each": list(about.federation.positions),
        "outputs": about.federation.outputs,
        **_constants(about.federation.metadata or {}, data),
        "label_map": _as_list(data.label_map),
        "classes": _as_list(data.classes),
    }
    flat = _flat(variables, about.algorithm)
    return _safetensors().save(flat, metadata={_KEY: json.dumps(facts)})


def _constants(about: Mapping[str, Any], data: ClientData) -> dict[str, Any]:
    """Returns scale and shift of inputs: those that the data have, or their normalisation."""
    if "input_mean" not in about:
        return {"scale": _as_list(data.scale), "shift": _as_list(data.shift)}
    mean, deviation = np.array(about["input_mean"]), np.array(about["input_deviation"])
    return {"scale": _as_list(1 / deviation), "shift": _as_list(-mean / deviation)}


def personalize(
    result: runner.Result, state: Any, t: int, ids: Sequence[int]
) -> Iterator[tuple[int, PyTree]]:
    """The variables that clients are served, as NumPy arrays: of a state after t rounds."""
    algorithm = result.phases[-1].algorithm
    # From wherever it was computed to one device, once for all clients.
    clients = state.clients if isinstance(state.clients, ClientStore) else None
    kept = state._replace(clients=()) if clients else wrap_clients(algorithm, state)
    state, data = jax.device_put(jax.device_get((kept, result.data)))
    seen = state._replace(clients=())
    offloaded = OffloadedRows(clients) if clients else None

    def served(member: Algorithm) -> Any:
        def one(state: Any, data: Any, client: PyTree, i: Any, t: Any, key: Any) -> PyTree:
            state = state._replace(rows=offloaded.join(state.rows)) if offloaded else state
            ctx = ClientContext(i, client_data(data, i), t, stage_key(key, PERSONAL, t, i))
            return member.personalize(state, client, ctx)

        return jax.jit(one)

    each = [served(member) for member in group_algorithms(algorithm)]
    key = jax.random.key(result.config["seed"])
    for i in ids:
        g = int(result.federation.groups[i])
        if clients:
            client = trees.row(clients.read(g, np.array([i])), 0)
        else:
            client = trees.row(state.clients[g], i)
        yield i, jax.device_get(each[g](seen, data, client, i, t, key))


def about(path: str | Path) -> dict[str, Any]:
    """What is written beside a model: whose it is, and what goes in and comes out.

    An example goes in as x * scale + shift where these are not None, computed in 64 bits. Output c
    stands for the class c of the dataset, or for those that `label_map` gives c; `classes` says
    which outputs count.
    """
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} cannot be read: {line}") from None
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise UsageError(f"{path} holds no model of this library")
    return facts


def load(path: str | Path, model: Any = None) -> tuple[Any, PyTree]:
    """A client's (model, variables): model.apply(variables, x) are its predictions.

    x is [B, ...], as `about` says; of classes, the outputs are logits.

    Args:
      model: your own network, as it was given to `run`, if it was.
    """
    facts = about(path)
    variables: dict[str, Any] = {}
    for name, leaf in _safetensors().load_file(path).items():
        *way, last = name.split("/")
        place = variables
        for word in way:
            place = place.setdefault(word, {})
        place[last] = jax.device_put(leaf)  # where asarray compiles a program for each shape
    try:
        net = _built(_tuples(facts["model"]), facts, model)
        x = jax.ShapeDtypeStruct((1, *facts["input_shape"]), facts["input_dtype"])
        shape = jax.eval_shape(net.apply, variables, x).shape
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # flax raises whatever a missing or wrong array raises
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path}: its network and its arrays do not fit: {line}") from None
    if shape != (1, *facts["each"], facts["outputs"]):
        raise UsageError(f"{path}: its network has outputs {shape[1:]}, not {facts['outputs']}")
    return net, variables


def check(folder: Path) -> None:
    """UsageError where nothing can be written, or where something is already."""
    _safetensors()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; choose another folder")


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise UsageError(
            "models are written with safetensors, which is not there: install it"
        ) from None
    return safetensors.numpy


def _ids(result: runner.Result, clients: Sequence[int] | None) -> list[int]:
    n = result.federation.clients
    ids = sorted(set(range(n) if clients is None else clients))
    if outside := [i for i in ids if not 0 <= i < n]:
        raise UsageError(f"there is no client {outside[0]}; there are {n}, from 0 to {n - 1}")
    return ids


def _state(result: runner.Result, best: bool) -> tuple[int, Any]:
    last = result.metrics[-1]
    if not best:
        return last["round"], result.state
    if result.best is None:
        raise UsageError("no round is best: the run had no validation examples to choose it by")
    return last["best_round"], result.best


def _network(member: Algorithm, about: Described) -> dict[str, Any]:
    """The network whose `apply` a method predicts with, as plain data."""
    net = getattr(member.predict, "__self__", None)
    if net is None or getattr(net, "apply", None) != member.predict:
        raise UsageError(
            f"{about.algorithm} predicts with a function of its own, which no file can hold; "
            "give Algorithm the apply of a network"
        )
    return _plain(net)


def _plain(net: Any) -> dict[str, Any]:
    if isinstance(net, UserNetwork):
        return {"kind": "own", "name": net.name, **json.loads(json.dumps(dict(net.settings)))}
    kinds = {made: name for name, made in NETWORKS.items()}
    if type(net) not in kinds:
        raise UsageError(f"{type(net).__name__} is a network of your own, which no file can hold")
    fields = {f.name: getattr(net, f.name) for f in dataclasses.fields(net)}
    settings = {name: v for name, v in fields.items() if name not in ("parent", "name")}
    inner = {k: _plain(v) if dataclasses.is_dataclass(v) else v for k, v in settings.items()}
    return {"kind": kinds[type(net)], **json.loads(json.dumps(inner))}


def _built(plain: dict[str, Any], facts: dict[str, Any], model: Any) -> Any:
    """A network from what `_plain` made of it: one of ours, or the one that is given."""
    if plain["kind"] == "own":
        name, settings = plain["name"], {k: plain[k] for k in plain if k not in ("kind", "name")}
        if model is None:
            raise UsageError(
                f"it is of a network of your own, {name}; load(path, model={name}) takes it"
            )
        words, given = custom.register({}, model=model)
        if given["model"] != name:
            raise UsageError(f"it is of the network {name}, and {given['model']} is given")
        net = words.model[name](outputs=facts["outputs"], **settings)
        shape, dtype = tuple(facts["input_shape"]), facts["input_dtype"]
        return dataclasses.replace(net, input_shape=shape, input_dtype=dtype)
    made = {
        key: _built(value, facts, model) if isinstance(value, dict) else value
        for key, value in plain.items()
        if key != "kind"
    }
    return NETWORKS[plain["kind"]](**made)


def _tuples(plain: Any) -> Any:
    """JSON with tuples for lists, as settings are."""
    if isinstance(plain, dict):
        return {key: _tuples(value) for key, value in plain.items()}
    return tuple(map(_tuples, plain)) if isinstance(plain, list) else plain


def _as_list(array: Any) -> Any:
    return None if array is None else np.asarray(array).tolist()


def _flat(variables: PyTree, name: str) -> dict[str, np.ndarray]:
    """Leaves by their path in nested dicts."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        if not all(isinstance(word, jax.tree_util.DictKey) for word in path):
            raise UsageError(
                f"{name} serves other things than nested dicts of arrays, which no file can hold"
            )
        flat["/".join(str(word.key) for word in path)] = np.ascontiguousarray(leaf)
    return flat
