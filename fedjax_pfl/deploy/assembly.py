"""Builds a method from settings and the description of a federation, on the server and on nodes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl.core import jaxprs, trees
from fedjax_pfl.core.algorithm import Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.data.partition import PartitionedData
from fedjax_pfl.deploy.node_file import DATA_SETTINGS
from fedjax_pfl.deploy.programs import Method, ServerPrograms
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.phase_inputs import PhaseInputs
from fedjax_pfl.runs.run_partitions import make_task
from fedjax_pfl.settings import configuration, custom
from fedjax_pfl.settings.general import SETTINGS, settings_with
from fedjax_pfl.simulation import forecast
from fedjax_pfl.simulation.execution_plan import Plan


def complete(user_settings: Mapping[str, Any]) -> tuple[ConfigDict, configuration.Registry]:
    """Completes settings for a run on several machines.

    Returns all settings, and the registry of built-in components and of the user-defined ones that
    they name. Raises UsageError for a setting that only has a meaning in a simulation.
    """
    registry, user_settings = custom.register(user_settings)
    settings = configuration.complete(user_settings, registry)
    configuration.specify(settings, registry)
    simulation_only = {
        "dropout": settings.dropout > 0,
        "sampling": settings.sampling != "random",
        "participants": settings.participants != "active",
        "step_seconds": settings.step_seconds is not None,
        "speed_spread": settings.speed_spread != SETTINGS["speed_spread"].default_value,
        "bandwidth": settings.bandwidth is not None,
        "deadline": settings.deadline is not None,
        "late": settings.late != SETTINGS["late"].default_value,
        "speed_trace": settings.speed_trace != "",
        "phases": len(settings.phases) > 0,
        "seeds": settings.seeds > 1,
        "own_partitions": settings.own_partitions,
        "sweep": settings.sweep != "",
        "reference": settings.reference,
        "reference_runs": settings.reference_runs != "",
        "initial_weights": settings.initial_weights != "",
        "augment": settings.augment,
        "evaluate_clients": settings.evaluate_clients is not None,
        "store": settings.store not in ("auto", "device"),
    }
    for name in settings_with("simulation_only"):
        simulation_only[name] = settings[name] != SETTINGS[name].default_value
    for name, is_set in simulation_only.items():
        if is_set:
            raise UsageError(
                f"{name} is for simulations and not for a run on several machines; leave it out"
            )
    return settings, registry


def to_plain(
    settings: ConfigDict, registry: configuration.Registry = configuration.BUILTINS
) -> dict[str, Any]:
    """Converts completed settings to JSON-compatible data, as they are stored and sent."""
    return json.loads(json.dumps(configuration.resolve(settings, registry)))


def user_code(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of a configuration's user-defined components, without the dataset.

    They are MODULE:NAME, by the setting that selects them, such as "algorithm". Only these names
    are sent. Each machine has its own copy of the code.
    """
    sources = {kind: str(settings.get(kind, "")) for kind in configuration.BUILTINS._fields}
    return {kind: source for kind, source in sources.items() if kind != "dataset" and ":" in source}


def node_settings(user_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that the server sends to nodes: all that affect training.

    They stay the same when a run is resumed, and nodes refuse a change.
    """
    settings, registry = complete(user_settings)
    all_settings = {**to_plain(settings, registry), **user_code(user_settings)}
    local_names = {*DATA_SETTINGS, *settings_with("resumable")}
    return {name: value for name, value in all_settings.items() if name not in local_names}


def federation_from(description: Mapping[str, Any]) -> Federation:
    """Builds the Federation record from a description that passes `schema.FEDERATION`."""
    shared, counts = description["alike"], description["counts"]
    n = len(counts)
    return Federation(
        counts=np.array([client_counts["train"] for client_counts in counts]),
        input_shape=tuple(shared["input_shape"]),
        outputs=shared["outputs"],
        active=np.arange(n) < n - description["held_out"],
        groups=np.arange(n, dtype=np.int32) % description["groups"],
        validation_counts=np.array([client_counts["validation"] for client_counts in counts]),
        input_dtype=shared["input_dtype"],
        positions=tuple(shared["each"]),
        metadata=_normalisation(description),
    )


def _normalisation(description: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the means and deviations that the federation's description has, as in a simulation.

    These are "input_mean" and "input_deviation" with one number for each input feature, 0 and 1 if
    it is not normalised, and "target_mean" and "target_deviation". None if there is no mean.
    """
    if "mean" not in description:
        return None
    normalised = np.array(description["alike"]["normalise"]["features"], bool)
    n, metadata = int(normalised.sum()), dict[str, Any]()
    for name, default in (("mean", 0.0), ("deviation", 1.0)):
        values = description[name]
        if n:
            inputs = np.full(len(normalised), default)
            inputs[normalised] = values[:n]
            metadata[f"input_{name}"] = inputs.tolist()
        if description["alike"]["normalise"]["targets"]:
            metadata[f"target_{name}"] = list(values[n:])
    return metadata


def zero_data(description: Mapping[str, Any]) -> FederatedData:
    """Returns data of one client without examples, for its shapes.

    `description` describes the federation and passes `schema.FEDERATION`.
    """
    shared = description["alike"]
    dtype, inner = shared["target"]

    def zeros(shape: Sequence[int], dtype: str) -> Any:
        # A view without memory of its own: nodes may describe huge shapes.
        return np.broadcast_to(np.zeros((), dtype), shape)

    widths = description["widths"]
    return FederatedData(
        x=zeros((1, *shared["input_shape"]), description["stored_dtype"]),
        y=zeros((1, *inner), dtype),
        **{
            name: Split(zeros((1, width), "int32"), zeros((1,), "int32"))
            for name, width in widths.items()
        },
        **{name: zeros(shape, kind) for name, (kind, shape) in shared["constants"].items()},
    )


def build_method(
    settings: ConfigDict,
    registry: configuration.Registry,
    description: Mapping[str, Any],
    arrays: FederatedData | None = None,
) -> tuple[Experiment, Method]:
    """Builds the experiment record, with one phase, that reports read, and the method.

    Args:
      settings: Completed settings.
      registry: Built-in and user-defined components.
      description: Description of the federation that passes `schema.FEDERATION`.
      arrays: Examples of the client that builds the method; None on the server.
    """
    federation = federation_from(description)
    data = zero_data(description) if arrays is None else arrays
    specified = configuration.specify(settings, registry)
    phase_settings, groups = specified.phases[0].settings, specified.phases[0].groups
    task = make_task(specified.settings, registry, np.asarray(data.y), federation)
    federation = federation._replace(task=task)
    inputs = PhaseInputs(
        configs=[phase_settings],
        group_configs=groups,
        swept=[],
        registry=registry,
        examples=[data],
        federation=federation,
        begin=0,
        mesh=None,
        is_attacker=np.zeros(federation.clients, bool),
        triggered=None,
    )
    plan = Plan(phase_settings.conv, 1)
    phase = Phase(inputs, plan, inputs.rounds(plan))
    method = Method(
        algorithm=phase.algorithm,
        federation=federation,
        seed=phase_settings.seed,
        max_update_norm=phase_settings.max_update_norm,
        evaluate_after=phase_settings.evaluate_after,
        validate_after=phase_settings.validate_after,
    )
    experiment = Experiment(
        phases=(phase,), partitions=(PartitionedData(data, federation),), remarks=()
    )
    return experiment, method


def build_server(
    settings: ConfigDict, registry: configuration.Registry, federation: Mapping[str, Any]
) -> tuple[Experiment, Method, ServerPrograms]:
    """Builds the experiment record, the method and the programs of the server.

    `federation` passes `schema.FEDERATION`. Raises UsageError if the method does not suit the data,
    or if memory is too small.
    """
    try:
        experiment, method = build_method(settings, registry, federation)
        programs = ServerPrograms(method, experiment.data, experiment.phases[0].inputs.cohort)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            "no method can be built for the data that the nodes describe "
            f"({type(error).__name__}: {error})"
        ) from error

    def size(tree: Any) -> int:
        return sum(map(trees.leaf_bytes, jax.tree.leaves(tree)))

    # An evaluation asks all clients at the same time, a round those of its cohort.
    round_bytes = max(size((group.payload, group.result.upload)) for group in programs.shapes)
    evaluation_bytes = max(
        size((group.served, group.payload if method.evaluate_after else ()))
        for group in programs.shapes
    )
    messages = max(round_bytes * programs.cohort, evaluation_bytes * method.federation.clients)
    needed = size(programs.shapes[0].state) + messages
    if shortage := forecast.shortage(forecast.Requirement(needed, 0, 0), forecast.capacity()):
        raise UsageError(
            f"the server needs {shortage} for the data that the nodes describe (the state, and the "
            f"messages of {programs.cohort} clients in a round and of "
            f"{method.federation.clients} in an evaluation); use a smaller model, or check the "
            "JSON files that tell the nodes where their examples are"
        )
    return experiment, method, programs


def observe_server_state(method: Method, state: State) -> dict[str, np.ndarray]:
    """Returns the method's diagnostics that depend on the server state only, by name.

    `state` is the server state with `clients` empty.
    """
    grouped = method.grouped
    clients = jax.eval_shape(grouped.init, jax.eval_shape(jax.random.key, 0)).clients

    def observe(state: State, clients: PyTree) -> dict[str, jax.Array]:
        return grouped.observe(state._replace(clients=clients))

    program, shapes = jax.make_jaxpr(observe, return_shape=True)(state, clients)
    names, server_leaves = sorted(shapes), len(jax.tree.leaves(state))

    def reads_clients(name: str) -> bool:
        _, used = jaxprs.prune(program.jaxpr, [name == candidate for candidate in names])
        return any(used[server_leaves:])

    kept_names = [name for name in names if not reads_clients(name)]

    def observe_kept(state: State) -> dict[str, jax.Array]:
        no_clients = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), clients)
        values = observe(state, no_clients)
        return {name: values[name] for name in kept_names}

    return jax.device_get(jax.jit(observe_kept)(state))
