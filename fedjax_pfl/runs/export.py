"""Exports the personal models of clients to `.safetensors` files, and loads them.

A file holds the variables that the client is served, by names such as params/conv1/kernel (or, for
PyTorch, conv1.weight), and the network's name and settings in JSON. Nothing in it is executed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from fedjax_pfl.core import tensor_file
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, PyTree
from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.core.groups import group_algorithms
from fedjax_pfl.core.randomness import PERSONAL, stage_key
from fedjax_pfl.core.tensor_file import safetensors_package
from fedjax_pfl.data import ClientData, client_data
from fedjax_pfl.data.normalise import select_constants
from fedjax_pfl.networks import torch_weights
from fedjax_pfl.report import run_reader
from fedjax_pfl.runs import checkpoints, run_directory
from fedjax_pfl.runs.build import build
from fedjax_pfl.runs.client_functions import client_ids, map_clients
from fedjax_pfl.runs.example_facts import example_facts
from fedjax_pfl.runs.network_json import from_json, lists_to_tuples, to_json
from fedjax_pfl.runs.result import Result, make_result
from fedjax_pfl.runs.resume import restore, state_templates
from fedjax_pfl.runs.run_state import SweepRun
from fedjax_pfl.settings import configuration, custom
from fedjax_pfl.settings.general import settings_with

_KEY = "fedjax_pfl"  # the only key of the metadata, because the order of keys is not fixed
_FORMAT = 1


def load_result(
    directory: str | Path,
    *,
    data_dir: str | None = None,
    **components: Unpack[custom.UserComponents],
) -> Result:
    """Loads the result of a finished run from its last checkpoint. Trains and writes nothing.

    Raises UsageError if the run is not finished, its checkpoint is damaged, or its data changed.

    Args:
      directory: The run directory.
      data_dir: Folder of prepared datasets. Default: the one of the run's configuration.
      **components: User-defined components that were passed to `run`.
    """
    directory = Path(directory)
    config, last = _finished_config(directory, components)
    loaded = {k: v for k, v in config.items() if k not in settings_with("resumable")}
    loaded["store"] = config.get("store", "device")  # the state may not fit on the device
    loaded["data_dir"] = data_dir or config.get("data_dir")
    registry, loaded = custom.register(loaded, **components)
    settings = configuration.complete(loaded, registry)
    experiment = build(settings, registry=registry, plans=run_directory.read_plans(directory))
    run_directory.check_examples(directory, example_facts(experiment))
    store = checkpoints.open_store(directory / "checkpoints", read_only=True)
    resolved = run_reader.as_json(configuration.resolve(settings, registry))
    try:
        at, state, best = restore(experiment, store, state_templates(experiment), last, resolved)
    except checkpoints.DamagedError as error:
        raise UsageError(
            f"{directory}: the checkpoint of round {last} is damaged: {error}; run the command of "
            "this run again to write it again"
        ) from None
    sweep_run = SweepRun(
        name="",
        settings=settings,
        config=resolved,
        directory=directory,
        at=at,
        best=best,
        observations=run_directory.read_observations(directory, last, read_only=True),
        resumed_at=last,
    )
    return make_result(experiment, sweep_run, state)


def _finished_config(directory: Path, components: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the resolved configuration and the last round of a finished run.

    Raises UsageError if the run is not finished or cannot be loaded. `components` are user-defined
    components by kind, as for `run`.
    """
    if not (directory / "config.json").is_file():
        inner = sorted(directory.glob("*/config.json"))
        hint = f"; it contains {len(inner)}, such as {inner[0].parent}" if inner else ""
        raise UsageError(f"{directory} is not a run directory: it has no config.json{hint}")
    config: dict[str, Any] = lists_to_tuples(run_reader.read_config(directory))
    try:
        phases: tuple[dict[str, Any], ...] = config["phases"] or ({},)
        last = sum(phase.get("rounds", config["rounds"]) for phase in phases)
    except (TypeError, KeyError):
        raise UsageError(f"{directory / 'config.json'} is damaged: it has no rounds") from None
    if not (directory / "report.html").is_file():
        raise UsageError(f"{directory} has not finished; run its command again to finish it")
    if config.get("deployed"):
        raise UsageError(
            f"{directory} is of a run that was deployed: each client has its own model on its own "
            "machine, and the server has none"
        )
    _check_components(directory, config, phases, components)
    if not (directory / "checkpoints" / str(last)).is_dir():
        raise UsageError(f"{directory} has no checkpoint of its last round, {last}")
    return config, last


def _check_components(
    directory: Path, config: Any, phases: Any, components: Mapping[str, Any]
) -> None:
    """Raises UsageError if the run has a user-defined component that is not in `components`.

    `config` is its resolved configuration, `phases` the settings that each phase changes.
    """
    for kind, builtins in configuration.BUILTINS._asdict().items():
        # A run of an older version may lack the setting.
        default = configuration.component_name(config, kind) if kind in config else None
        names = {str(name) for name in (default, *(p.get(kind, default) for p in phases)) if name}
        if components.get(kind) is None and (missing := sorted(names - set(builtins))):
            article = "an" if kind[0] in "aeiou" else "a"
            raise UsageError(
                f"{directory} was run with {article} {kind} of your own, {missing[0]}; in Python, "
                f"use fedjax_pfl.runs.export.load_result(..., {kind}=...)"
            )


def write_models(
    result: Result,
    folder: str | Path,
    clients: Sequence[int] | None = None,
    *,
    best: bool = False,
    torch: bool = False,
) -> list[Path]:
    """Writes each client's personal model to client-ID.safetensors in a folder. Returns the paths.

    Raises UsageError if the folder has files or a client does not exist.

    Args:
      result: Result of a run.
      folder: The folder, which must be new or empty.
      clients: Client ids. Default: all.
      best: True for the models of the round with the best validation score instead of the last.
      torch: True for names and layout of a PyTorch `state_dict`, which safetensors.torch.load_file
        reads; for networks of convolutions, dense layers and norms.
    """
    folder = Path(folder)
    check_folder(folder)
    ids = client_ids(result, clients)
    t, state = _select_state(result, best)
    phase = result.phases[result.phase]
    run = RunFacts(
        algorithm=phase.config.algorithm,
        dataset=result.config["dataset"],
        seed=result.config["seed"],
        federation=result.federation,
    )
    members = group_algorithms(phase.algorithm)
    for member in members:
        network = _network(member, run.algorithm)
        if torch:
            torch_weights.check_layers(network, run.federation.input_shape)
    paths = []
    for i, variables in personalize(result, state, t, ids):
        member = members[int(result.federation.groups[i])]
        examples = client_data(result.data, np.asarray(i))
        content = pack(
            run, member, client=i, rounds=t, data=examples, variables=variables, torch=torch
        )
        paths.append(folder / f"client-{i}.safetensors")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths[-1].write_bytes(content)
        except OSError as error:
            raise UsageError(f"{paths[-1]} cannot be written ({error.strerror})") from None
    return paths


class RunFacts(NamedTuple):
    """Facts that the models of all clients of a run have in common."""

    algorithm: str  # name of the method
    dataset: str
    seed: int
    federation: Federation


def pack(
    run: RunFacts,
    member: Algorithm,
    *,
    client: int,
    rounds: int,
    data: ClientData,
    variables: PyTree,
    torch: bool = False,
) -> bytes:
    """Returns the content of a client's .safetensors file: description and variables.

    `member` is the algorithm of the client's group; `variables` are those of the personal model
    after `rounds` rounds, nested dicts of arrays. `torch` is True for names and layout of
    PyTorch.
    """
    network = _network(member, run.algorithm)
    facts = {
        "format": _FORMAT,
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "model": to_json(network),
        "layout": "torch" if torch else "flax",
        "client": client,
        "round": rounds,
        "seed": run.seed,
        "input_shape": list(run.federation.input_shape),
        "input_dtype": run.federation.input_dtype,
        "each": list(run.federation.positions),
        "outputs": run.federation.outputs,
        **_constants(select_constants(run.federation.metadata or {}, client), data),
        "label_map": _as_list(data.label_map),
        "classes": _as_list(data.classes),
    }
    arrays = _by_name(variables, run.algorithm)
    if torch:
        arrays = torch_weights.state_dict(network, variables, run.federation.input_shape)
    return safetensors_package().numpy.save(arrays, metadata={_KEY: json.dumps(facts)})


def _constants(metadata: Mapping[str, Any], data: ClientData) -> dict[str, Any]:
    """Returns `scale`, `shift`, `target_mean` and `target_deviation`, each a list or None.

    The network gets x * scale + shift, from the mean and deviation of the client in `metadata` if
    it has them, else from `data`. It predicts (y - target_mean) / target_deviation.
    """
    facts = {name: metadata.get(name) for name in ("target_mean", "target_deviation")}
    if "input_mean" not in metadata:
        return {"scale": _as_list(data.scale), "shift": _as_list(data.shift), **facts}
    mean, deviation = np.array(metadata["input_mean"]), np.array(metadata["input_deviation"])
    return {"scale": _as_list(1 / deviation), "shift": _as_list(-mean / deviation), **facts}


def personalize(
    result: Result, state: Any, t: int, ids: Sequence[int]
) -> Iterator[tuple[int, PyTree]]:
    """Yields each client id and the variables of its personal model, a tree of NumPy arrays.

    `state` is the state after `t` rounds: the last or the best one of the result.
    """

    def serve(member: Algorithm, state: Any, client: PyTree, ctx: ClientContext) -> PyTree:
        ctx = ctx._replace(key=stage_key(ctx.key, PERSONAL, ctx.t, ctx.i))
        return member.personalize(state, client, ctx)

    return map_clients(serve, result, state, t, ids)


def describe(path: str | Path) -> dict[str, Any]:
    """Returns the description of a model file by field, such as `input_shape` and `outputs`.

    Inputs are x * scale + shift if these are not None, computed in 64 bits. Output c is class c of
    the dataset, or the classes that `label_map` maps to c. `classes` says which outputs count. For
    a regression, outputs times target_deviation plus target_mean are targets, if these are not
    None. Raises UsageError for other files.
    """
    package = safetensors_package()
    try:
        with package.safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    except (OSError, package.SafetensorError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise UsageError(f"{path} holds no model of this library")
    return facts


def load(path: str | Path, model: Any = None) -> tuple[Any, PyTree]:
    """Returns a client's network and variables; network.apply(variables, x) are its predictions.

    x has shape [B, ...] and the scale of `describe`. Outputs of classes are logits. A user-defined
    network is passed again as `model`.
    """
    facts = describe(path)
    try:
        net = from_json(lists_to_tuples(facts["model"]), facts, model)
        if facts.get("layout") == "torch":
            variables = torch_weights.from_torch(path, net, facts["input_shape"])
        else:
            variables = _nested(tensor_file.read(path))
        x = jax.ShapeDtypeStruct((1, *facts["input_shape"]), facts["input_dtype"])
        shape = jax.eval_shape(net.apply, variables, x).shape
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # flax raises many types for a missing or wrong array
        problem = f"{path}: its network and its arrays do not fit: {first_line(error)}"
        raise UsageError(problem) from None
    if shape != (1, *facts["each"], facts["outputs"]):
        raise UsageError(f"{path}: its network has outputs {shape[1:]}, not {facts['outputs']}")
    return net, variables


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns nested dicts of arrays on the device; the inverse of `_by_name`."""
    variables: dict[str, Any] = {}
    for name, leaf in arrays.items():
        *parents, last = name.split("/")
        level = variables
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = jax.device_put(leaf)  # asarray would compile a program for each shape
    return variables


def check_folder(folder: Path) -> None:
    """Raises UsageError if safetensors is not installed or `folder` is a file or not empty."""
    safetensors_package()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; choose another folder")


def _select_state(result: Result, best: bool) -> tuple[int, Any]:
    """Returns a number of rounds and the state after them: the last or, if `best`, the best one.

    Raises UsageError if there is no best one.
    """
    if not best:
        return result.round, result.state
    if result.best is None:
        reason = "the run had no validation examples to choose it"
        if any(line["validation"] for line in result.metrics if line["phase"] == result.phase):
            reason = "no evaluation of the last phase has finite validation scores of all clients"
        raise UsageError(f"there is no best round: {reason}; export the last one")
    return result.metrics[-1]["best_round"], result.best


def _network(member: Algorithm, algorithm: str) -> Any:
    """Returns the network that makes a group's predictions.

    Raises UsageError if `member`, the group's algorithm, predicts with anything but the `apply` of
    a network; `algorithm` is the method's name for the message.
    """
    net = getattr(member.predict, "__self__", None)
    if net is None or getattr(net, "apply", None) != member.predict:
        raise UsageError(
            f"{algorithm} predicts with a function of its own, which no file can hold; "
            "give Algorithm the apply of a network"
        )
    return net


def _as_list(array: Any) -> Any:
    return None if array is None else np.asarray(array).tolist()


def _by_name(variables: PyTree, algorithm: str) -> dict[str, np.ndarray]:
    """Returns the arrays of nested dicts by name such as params/conv1/kernel.

    Raises UsageError, which names the method `algorithm`, for other variables.
    """
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        if not all(isinstance(key, jax.tree_util.DictKey) for key in path):
            raise UsageError(
                f"{algorithm} serves something other than nested dicts of arrays, which no file "
                "can hold"
            )
        arrays["/".join(str(key.key) for key in path)] = np.asarray(leaf, order="C")
    return arrays
