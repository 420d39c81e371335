"""From a configuration to all that a run needs: data, algorithms and compiled rounds per phase."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl import data
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core import groups
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.task import Task, check_labels, check_task, infer_task, select_metrics
from fedjax_pfl.data.augment import on_normalised
from fedjax_pfl.runs import points
from fedjax_pfl.runs.phase import Phase, PhaseInputs
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import (
    execution_plan,
    forecast,
    memory_estimate,
    multiprocess,
    offloaded_rows,
    sweep,
)
from fedjax_pfl.simulation.execution_plan import Plan
from fedjax_pfl.simulation.records import CompiledRounds

# XLA allocated 1.31 times the estimate for pFedLA with 1,000 clients, less for small runs.
_SLACK = 4 / 3
# So many of fifty images, as the last batch of an epoch, cost up to 24 points with BatchNorm.
_FEW = 2


class Experiment(NamedTuple):
    """Everything that a run needs, before anything is compiled or written."""

    phases: tuple[Phase, ...]
    data: data.FederatedData
    federation: Federation
    remarks: tuple[str, ...]  # on what is allowed and may cost accuracy
    memory: forecast.Requirement = forecast.Requirement(
        0, 0, 0
    )  # at the least; nothing where others compute

    def of(self, points: Sequence[int]) -> "Experiment":
        """The same of some points."""
        return self._replace(phases=tuple(phase.of(points) for phase in self.phases))


def build(
    *configs: ConfigDict,
    words: configuration.Registry = configuration.BUILTINS,
    plans: Sequence[Plan] | None = None,
) -> Experiment:
    """Load, partition and put together, or raise UsageError.

    Args:
      configs: one; or the points of a sweep, for a program that computes them all.
      plans: one for each phase, where a run goes on that had them.
    """
    specified = [configuration.specify(one, words) for one in configs]
    config = specified[0].settings

    def own(name: str) -> dict[str, Any]:
        return config.get(name, ConfigDict()).to_dict()

    dataset = data.load(
        config.dataset,
        config.data_dir,
        fraction=config.fraction,
        fraction_seed=config.partition_seed,
        sources=words.dataset,
        **own(data.source_name(config.dataset)),
    )
    arrays, federation, _ = data.federate(
        dataset,
        config.partition,
        settings=own(config.partition),
        clients=config.clients,
        seed=config.partition_seed,
        split=config.split,
        test_fraction=config.test_fraction,
        validation_fraction=config.validation_fraction,
        validation_examples=config.validation_examples,
        permute_labels=config.permute_labels,
        held_out=config.held_out,
        groups=len(specified[0].phases[0].groups),
    )
    task = task_of(config, words, arrays.y, federation)
    if config.augment:
        if arrays.scale is None or len(federation.input_shape) != 3:
            raise UsageError(f"augment is for images, and {config.dataset} has none; leave it off")
        task = task._replace(augment=on_normalised(arrays.scale, arrays.shift))
    federation = federation._replace(task=task)
    _check_store(config.store, several=len(configs) > 1)
    phases, states, begin = list[Phase](), list[Any](), 0
    each = [one.phases for one in specified]
    cohorts = (one.settings.clients_per_round or config.clients for one in each[0])
    mesh = execution_plan.mesh(config.devices, max(cohorts), several=len(configs) > 1)
    unread = points.differing(configs)
    for number, same in enumerate(zip(*each, strict=True)):
        alike = [one.settings for one in same]
        names = points.names(alike, words.algorithm)
        unread -= set(names)
        among = _taking_part(alike[0], federation)
        inputs = PhaseInputs(alike, same[0].groups, names, words, arrays, among, begin, mesh)
        inputs.algorithms(alike[0].conv)  # which checks the numbers of every point
        recorded = plans[number] if plans and number < len(plans) else None
        # Whether each can start from the one before, and has room, is known before hours are spent.
        phase, state = _with_room(inputs, recorded, states[-1] if states else None)
        _check_observed(phase, state)
        phases, states, begin = [*phases, phase], [*states, state], phase.end
    for name in unread:
        raise UsageError(f"{name} is read by no phase and makes no difference; give it one value")
    remarks = [_short_batches(phase, state) for phase, state in zip(phases, states, strict=True)]
    remarks += [_left_out(config, dataset, federation), *map(_remark, phases)]
    said = tuple(dict.fromkeys(line for line in remarks if line))
    needs = [_sizes(phase, state) for phase, state in zip(phases, states, strict=True)]
    processes = multiprocess.count()
    there = forecast.capacity(phases[0].inputs.devices // processes)
    store = forecast.choose_store(
        needs, config.store, there, several=len(configs) > 1, processes=processes
    )
    phases = [phase._replace(store=store) for phase in phases]
    takes = forecast.maximum([forecast.required(one, store) for one in needs])
    return Experiment(tuple(phases), arrays, federation, said, takes)


def _sizes(phase: Phase, state: Any) -> forecast.PhaseSizes:
    """What its memory depends on; `state` is of all points of a sweep."""
    inputs, points = phase.inputs, len(phase.inputs.alike)
    cohort, clients = inputs.cohort, inputs.federation.clients
    count = memory_estimate.tree_bytes
    examples, sent, mapped = forecast.example_bytes(inputs.arrays, cohort)
    best = bool(np.sum(inputs.arrays.validation.size))
    server, rows, own = (count(part) // points for part in state)
    offloaded_shapes = offloaded_rows.split_state(phase.algorithm, state)[1][
        len(groups.group_algorithms(phase.algorithm)) :
    ]
    return forecast.PhaseSizes(
        server,
        -(-rows // clients),
        -(-own // clients),
        clients,
        cohort,
        phase.end,
        examples,
        sent,
        best,
        points,
        inputs.devices,
        mapped,
        -(-count(offloaded_shapes) // (points * clients)),
    )


def described(experiment: Experiment) -> dict[str, Any]:
    """What the numbers of examples stand for, and where files were read a digest of what they held.

    It has no entry for examples that a configuration alone says everything of.
    """
    facts = dict(experiment.federation.metadata or {})
    if np.issubdtype(experiment.data.y.dtype, np.floating):
        facts["score_deviation"] = _deviation(experiment.data)
    if data.reads_own_files(experiment.phases[0].config.dataset):
        owners = np.array(experiment.federation.owners or (), str)
        arrays = map(np.asarray, jax.tree.leaves(experiment.data))
        facts["digest"] = data.digest([*arrays, owners])
    return facts


def _deviation(examples: data.FederatedData) -> float:
    """Of targets, as they are scored: the error of predicting each one's mean over training."""
    rows, size = (np.asarray(part) for part in examples.train)
    used = rows[np.arange(rows.shape[1]) < size[:, None]]
    return float(np.sqrt(np.mean(np.var(np.asarray(examples.y)[used], 0, dtype=np.float64))))


def task_of(
    config: ConfigDict, words: configuration.Registry, y: Any, federation: Federation
) -> Task:
    """What is learned, with the metrics that are named; looked at by shapes if it is not ours."""
    outputs = federation.outputs
    name = infer_task(y) if config.task == "auto" else config.task
    check_labels(name, y)
    task = words.task[name](outputs, **config.get(name, ConfigDict()).to_dict())
    if not isinstance(task, Task):
        raise UsageError(f"{name} returns no Task, but {type(task).__name__}")
    names = [one.strip() for one in config.metrics.split(",") if one.strip()]
    task = select_metrics(task, name, names)
    if name not in configuration.TASKS:
        seen = jax.ShapeDtypeStruct((2, *federation.positions, outputs), jnp.float32)
        check_task(name, task, seen, jax.ShapeDtypeStruct((2, *y.shape[1:]), y.dtype))
    return task


def _check_observed(phase: Phase, state: Any) -> None:
    """UsageError where an observation has a name that is no name of a file."""
    algorithm, one = (
        phase.algorithm,
        sweep.shapes_of_one(state) if len(phase.inputs.alike) > 1 else state,
    )
    for name in jax.eval_shape(algorithm.observe, one):
        if not re.fullmatch("[A-Za-z0-9_]+", name):
            raise UsageError(
                f"{phase.config.algorithm}: observe gives {name!r}, which is to be the name of a "
                "file; use letters, digits and _"
            )


def _short_batches(phase: Phase, state: Any) -> str:
    """A line where BatchNorm will normalise by so few examples, which can be left out."""
    one, federation = phase.config, phase.inputs.federation
    norm = jax.tree_util.DictKey("batch_stats")
    has_norm = any(norm in path for path, _ in jax.tree_util.tree_leaves_with_path(state))
    if not has_norm or one.local_steps or one.drop_last:
        return ""
    counts = federation.counts[federation.active]
    last = counts % one.batch_size
    hurt = int(np.sum((counts > one.batch_size) & (last > 0) & (last <= _FEW)))
    if not hurt:
        return ""
    return (
        f"an epoch of {hurt} of {len(counts)} clients ends with a batch of {_FEW} examples or "
        "fewer, which can cost accuracy with BatchNorm; drop_last leaves it out"
    )


def _check_store(store: str, *, several: bool) -> None:
    """UsageError where what is to be kept elsewhere than on the devices cannot be."""
    if several and store not in ("auto", "device"):
        line, alone = "seeds and sweep are for store=device", "run them one by one"
    elif multiprocess.count() > 1 and store in ("host", "disk"):
        line, alone = "several processes are for store=device or sharded", "use one process"
    else:
        return
    raise UsageError(f"{line}, and store is {store}; {alone}, or leave store out")


def _remark(phase: Phase) -> str:
    """Returns what a method has to say about its settings before the run, or ""."""
    name = phase.config.algorithm
    if name not in METHODS:
        return ""
    return METHODS[name].remark(phase.config.get(name, ConfigDict()), phase.federation.clients)


def _left_out(one: ConfigDict, dataset: data.Dataset, federation: Federation) -> str:
    """A line where examples have owners who are not all of the clients."""
    if dataset.owner_train is None:
        return ""
    owners = len(np.unique(dataset.owner_train))
    if one.partition != "natural":
        return (
            f"{dataset.name} has {owners} owners, and partition={one.partition} deals their "
            "examples to anyone; with partition=natural each client is one of them"
        )
    if federation.clients < owners:
        return f"{federation.clients} of the {owners} owners of {dataset.name} are clients"
    return ""


def _taking_part(one: ConfigDict, federation: Federation) -> Federation:
    """The federation of a phase: with `held_out` the novel clients are the active ones."""
    if one.participants == "active":
        return federation
    return federation._replace(active=~federation.active)


def _with_room(inputs: PhaseInputs, recorded: Plan | None, before: Any) -> tuple[Phase, Any]:
    """A phase of as many clients at a time as memory_gb has room for; the state's shapes after it.

    Args:
      recorded: the plan of the run so offloaded_shapes, where it goes on.
      before: the state's shapes at the end of the phase before.
    """
    one, clients = inputs.alike[0], inputs.federation.clients
    chosen = Plan(one.conv, one.chunk or execution_plan.default_chunk(clients))
    if recorded:
        conv = recorded.conv if one.conv == "auto" else one.conv
        chosen = Plan(conv, one.chunk or recorded.chunk)
    rounds = inputs.rounds(chosen)
    try:
        state = _traced(inputs, rounds, before)
    except TypeError as error:
        if not inputs.swept:
            raise
        alone = Phase(inputs, chosen, rounds).of([0])  # where it may raise as well
        _traced(alone.inputs, alone.rounds, before and sweep.shapes_of_one(before))
        names = _apart(inputs, chosen, before)
        named = " or ".join(names)
        raise sweep.SeparateRunsError(
            names,
            f"{named} cannot differ in one program ({named} shapes the program, or Python chooses "
            "by its number what is computed); run its values one by one",
        ) from error
    while one.memory_gb is not None and (most := _needed(inputs, rounds, state)) > one.memory_gb:
        if chosen.chunk == 1 or one.chunk:
            fewer = "fewer seeds or points of the sweep, " if len(inputs.alike) > 1 else ""
            raise UsageError(
                f"with {chosen.chunk} of {clients} clients at a time this needs about {most:.3g} "
                f"GB, and memory_gb is {one.memory_gb}; take fewer clients, {fewer}a smaller "
                f"{'chunk, ' if chosen.chunk > 1 else ''}model or batch_size"
            )
        chosen = Plan(chosen.conv, chosen.chunk // 2)
        rounds = inputs.rounds(chosen)
    return Phase(inputs, chosen, rounds), state


def _apart(inputs: PhaseInputs, plan: Plan, before: Any) -> Sequence[str]:
    """Of settings that cannot all be traced, those that cannot be by themselves either."""
    found = []
    for name in inputs.swept if len(inputs.swept) > 1 else ():
        one = dataclasses.replace(inputs, swept=[name])
        try:
            _traced(one, one.rounds(plan), before)
        except TypeError:
            found.append(name)
    return found or inputs.swept


def _traced(inputs: PhaseInputs, rounds: CompiledRounds, before: Any) -> Any:
    """The state's shapes; of a sweep all is traced, where what cannot be swept shows."""
    state = jax.eval_shape(rounds.init, jax.eval_shape(inputs.points), before)
    if inputs.swept:
        _trace(inputs, rounds, state)
    return state


def _trace(inputs: PhaseInputs, rounds: CompiledRounds, state: Any) -> None:
    """Go through a round and an evaluation, without compiling them."""
    key, number = jax.eval_shape(inputs.points), jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(rounds.run, key, state, inputs.arrays, number, number)
    jax.eval_shape(rounds.evaluate, key, state, inputs.arrays, number)


def fixed_length(experiment: Experiment) -> str:
    """Why the last phase cannot be made longer; nothing where its rounds do not depend on that."""
    last, state = experiment.phases[-1], None
    if last.config.learning_rate_drops:
        return "learning_rate_drops are shares of all rounds"
    if last.config.learning_rate_schedule != "constant" and last.config.schedule_over == "rounds":
        return "learning_rate_schedule is over all rounds"
    for phase in experiment.phases:
        state = jax.eval_shape(phase.rounds.init, jax.eval_shape(phase.inputs.points), state)
    _trace(last.inputs, last.rounds, state)
    return f"{last.config.algorithm} has a schedule over all rounds" if last.inputs.asked else ""


def _needed(inputs: PhaseInputs, rounds: CompiledRounds, state: Any) -> float:
    """GB of a round or an evaluation, and of a checkpoint, which is a copy of the state."""
    key, number = jax.eval_shape(inputs.points), jax.ShapeDtypeStruct((), jnp.int32)
    run = memory_estimate.peak_bytes(rounds.run, key, state, inputs.arrays, number, number)
    evaluate = memory_estimate.peak_bytes(rounds.evaluate, key, state, inputs.arrays, number)
    return (_SLACK * max(run, evaluate) + memory_estimate.tree_bytes(state)) / 1e9
