"""Builds a run from a configuration: data, algorithms and compiled rounds of each phase."""

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl import data, transforms
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core import groups
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.partition import PartitionedData
from fedjax_pfl.report.run_reader import OWN_FIGURES
from fedjax_pfl.runs import run_partitions
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.phase_inputs import PhaseInputs
from fedjax_pfl.runs.sweep_settings import differing_settings, swept_settings
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import (
    clients_csv,
    execution_plan,
    forecast,
    memory_estimate,
    multiprocess,
    offloaded_rows,
    sweep,
)
from fedjax_pfl.simulation.execution_plan import Plan
from fedjax_pfl.simulation.records import CompiledRounds

# Allocated memory over estimated memory: XLA needed 1.31 for pFedLA with 1,000 clients.
_MEMORY_FACTOR = 4 / 3
# A last batch of 2 images instead of 50 cost up to 24 points of accuracy with BatchNorm.
_SHORT_BATCH = 2


class Experiment(NamedTuple):
    """Inputs of a run, before anything is compiled or written."""

    phases: tuple[Phase, ...]  # parts of the run with one algorithm each, in order
    partitions: tuple[PartitionedData, ...]  # of each run of a sweep, or one for all runs
    remarks: tuple[str, ...]  # warnings for the user, about settings that can cost accuracy
    memory: forecast.Requirement = forecast.Requirement(0, 0, 0)  # least bytes needed; 0: unknown
    statements: tuple[transforms.Statement, ...] = ()  # about transforms, such as privacy

    @property
    def data(self) -> data.FederatedData:
        """Returns the examples of all clients; with own partitions, those of the first run."""
        return self.partitions[0].examples

    @property
    def federation(self) -> Federation:
        """Returns facts about the clients; with own partitions, those of the first run."""
        return self.partitions[0].federation

    def select(self, runs: Sequence[int]) -> "Experiment":
        """Returns the experiment with only the runs of a sweep at these indices."""
        return self._replace(
            phases=tuple(phase.select(runs) for phase in self.phases),
            partitions=tuple(run_partitions.select(self.partitions, runs)),
        )


def build(
    *configs: ConfigDict,
    registry: configuration.Registry = configuration.BUILTINS,
    plans: Sequence[Plan] | None = None,
) -> Experiment:
    """Loads and partitions the data and builds the phases; nothing is compiled.

    Several configurations are the runs of a sweep in one program. `plans` are the execution plans
    that a resumed run used before in each phase. Raises UsageError for settings that are invalid or
    do not fit together.
    """
    specified = [configuration.specify(config, registry) for config in configs]
    config, is_sweep = specified[0].settings, len(configs) > 1
    settings_of_runs = [specification.settings for specification in specified]
    count = len(specified[0].phases[0].groups)
    dataset, partitions = run_partitions.load(settings_of_runs, registry, groups=count)
    federation, examples = run_partitions.shared_facts(config, partitions), partitions[0].examples
    _check_store(config.store, is_sweep=is_sweep)
    phases, states, begin = list[Phase](), list[Any](), 0
    phases_of_runs = [specification.phases for specification in specified]
    cohort = max(phase.settings.clients_per_round or config.clients for phase in phases_of_runs[0])
    mesh = execution_plan.mesh(config.devices, cohort, several=is_sweep)
    unread, attacked = differing_settings(configs), dict[str, transforms.DataAttack]()
    for number, phase_of_runs in enumerate(zip(*phases_of_runs, strict=True)):
        phase_configs = [phase.settings for phase in phase_of_runs]
        swept = swept_settings(phase_configs, registry.algorithm)
        unread -= set(swept)
        others_trained = any(phase.config.participants == "active" for phase in phases)
        participants = _participants(phase_configs[0], federation, others_trained=others_trained)
        attack = attacked.get(phase_configs[0].participants)
        attack = attack or transforms.attack_data(config.get, examples, participants)
        attacked[phase_configs[0].participants] = attack
        inputs = PhaseInputs(
            configs=phase_configs,
            group_configs=phase_of_runs[0].groups,
            swept=swept,
            registry=registry,
            examples=[attack.train, *(partition.examples for partition in partitions[1:])],
            federation=participants,
            begin=begin,
            mesh=mesh,
            is_attacker=transforms.select_attackers(config.get, participants),
            triggered=attack.triggered,
        )
        if len(partitions) > 1:
            run_partitions.check_draws(inputs.is_attacker, inputs.evaluated)
        inputs.algorithms(phase_configs[0].conv)  # checks the settings of every run
        recorded = plans[number] if plans and number < len(plans) else None
        # Checks now that the phase can start from the previous one and fits into memory.
        phase, state = _fit_memory(inputs, recorded, states[-1] if states else None)
        _check_observations(phase, state)
        phases, states, begin = [*phases, phase], [*states, state], phase.end
    for name in unread:
        raise UsageError(f"{name} is read by no phase and makes no difference; give it one value")
    transforms.require_attackers(config.get, [phase.inputs.is_attacker for phase in phases])
    remarks = [_short_batches(phase, state) for phase, state in zip(phases, states, strict=True)]
    remarks += [run_partitions.omitted_owners(config, dataset, federation)]
    remarks += [_no_validation(config, examples), *map(_remark, phases)]
    sizes = [_sizes(phase, state) for phase, state in zip(phases, states, strict=True)]
    processes = multiprocess.count()
    available = forecast.capacity(phases[0].inputs.devices // processes)
    store = forecast.choose_store(
        sizes, config.store, available, several=is_sweep, processes=processes
    )
    return Experiment(
        phases=tuple(phase._replace(store=store) for phase in phases),
        partitions=tuple(partitions),
        remarks=tuple(dict.fromkeys(line for line in remarks if line)),
        memory=forecast.maximum([forecast.required(phase, store) for phase in sizes]),
        statements=_statements(phases),
    )


def _statements(phases: Sequence[Phase]) -> tuple[transforms.Statement, ...]:
    """Returns the run's statements about its transforms. They are for runs with one phase."""
    first, *later_phases = phases
    stated = transforms.statements(first.config.get, first.federation)
    if stated and later_phases:
        raise UsageError("differential privacy is for runs without phases; leave phases out")
    return tuple(stated)


def _sizes(phase: Phase, state: Any) -> forecast.PhaseSizes:
    """Returns the bytes of a phase for one run; `state` has the shapes of all runs of a sweep."""
    inputs, sweep_runs = phase.inputs, len(phase.inputs.configs)
    clients, count_bytes = inputs.federation.clients, memory_estimate.tree_bytes
    examples, cohort_examples, mapped = forecast.example_bytes(inputs.arrays, inputs.cohort)
    server, rows, client_state = (count_bytes(part) // sweep_runs for part in state)
    groups_count = len(groups.group_algorithms(phase.algorithm))
    offloaded_parts = offloaded_rows.split_state(phase.algorithm, state)[1][groups_count:]
    return forecast.PhaseSizes(
        server=server,
        row=-(-rows // clients),
        client=-(-client_state // clients),
        clients=clients,
        cohort=inputs.cohort,
        rounds=phase.end,
        examples=examples * len(inputs.examples),
        cohort_examples=cohort_examples,
        has_best=bool(np.sum(inputs.arrays.validation.size)),
        sweep_runs=sweep_runs,
        devices=inputs.devices,
        mapped=mapped,
        offload=-(-count_bytes(offloaded_parts) // (sweep_runs * clients)),
    )


def _check_observations(phase: Phase, state: Any) -> None:
    """Raises UsageError if `Algorithm.observe` of the phase returns a name that no figure can have.

    `state` has the shapes of the phase's state.
    """
    run_state = sweep.shapes_of_one(state) if len(phase.inputs.configs) > 1 else state
    for name in jax.eval_shape(phase.algorithm.observe, run_state):
        label = f"{phase.config.algorithm}: observe returns {name!r}, which"
        if not re.fullmatch("[A-Za-z0-9_]+", name):
            raise UsageError(f"{label} cannot be the name of a file; use letters, digits and _")
        if name in OWN_FIGURES:
            raise UsageError(f"{label} is a figure of every report; choose another name")
        column = name.removeprefix(clients_csv.OBSERVED)
        if column != name and clients_csv.is_own_column(column):
            raise UsageError(f"{label} is a column of every clients.csv; choose another name")


def _short_batches(phase: Phase, state: Any) -> str:
    """Returns a warning if the last batch of an epoch has 1 or 2 examples and there is BatchNorm.

    Otherwise returns "". `state` has the shapes of the phase's state.
    """
    config, federation = phase.config, phase.inputs.federation
    norm = jax.tree_util.DictKey("batch_stats")
    has_norm = any(norm in path for path, _ in jax.tree_util.tree_leaves_with_path(state))
    if not has_norm or config.local_steps or config.drop_last:
        return ""
    counts = federation.counts[federation.active]
    last = counts % config.batch_size
    affected = int(np.sum((counts > config.batch_size) & (last > 0) & (last <= _SHORT_BATCH)))
    if not affected:
        return ""
    return (
        f"an epoch of {affected} of {len(counts)} clients ends with a batch of {_SHORT_BATCH} "
        "examples or fewer, which can cost accuracy with BatchNorm; drop_last leaves it out"
    )


def _no_validation(config: ConfigDict, examples: data.FederatedData) -> str:
    """Returns a warning if validate_after has no validation examples to use, or ""."""
    if not config.validate_after or np.sum(examples.validation.size):
        return ""
    return (
        "validate_after has no effect without validation examples; set validation_fraction to "
        "select the best round"
    )


def _check_store(store: str, *, is_sweep: bool) -> None:
    """Raises UsageError if the setting `store` does not allow a sweep or several processes."""
    if is_sweep and store not in ("auto", "device"):
        line, remedy = "seeds and sweep are for store=device", "run them one by one"
    elif multiprocess.count() > 1 and store in ("host", "disk"):
        line, remedy = "several processes are for store=device or sharded", "use one process"
    else:
        return
    raise UsageError(f"{line}, and store is {store}; {remedy}, or leave store out")


def _remark(phase: Phase) -> str:
    """Returns the warning of a method about its settings, or ""."""
    name = phase.config.algorithm
    if name not in METHODS:
        return ""
    return METHODS[name].remark(phase.config.get(name, ConfigDict()), phase.federation.clients)


def _participants(
    config: ConfigDict, federation: Federation, *, others_trained: bool
) -> Federation:
    """Returns the federation with the clients of a phase active: held-out clients or the others.

    `others_trained` tells whether the others trained in an earlier phase. With privacy the
    federation has no class counts, which methods could use without noise.
    """
    if transforms.statements(config.get, federation):
        federation = federation._replace(class_counts=None)
    if config.participants == "active":
        return federation
    earlier = federation.active if others_trained else None
    return federation._replace(active=~federation.active, earlier=earlier)


def _fit_memory(inputs: PhaseInputs, recorded: Plan | None, start: Any) -> tuple[Phase, Any]:
    """Returns a phase with the largest chunk that fits `memory_gb`, and the shapes of its state.

    `recorded` is the plan that a resumed run used before; `start` has the shapes of the state after
    the previous phase. Raises UsageError if no chunk fits, SeparateRunsError if a swept setting
    cannot be traced.
    """
    config, clients = inputs.configs[0], inputs.federation.clients
    plan = Plan(config.conv, config.chunk or execution_plan.default_chunk(clients))
    if recorded:
        conv = recorded.conv if config.conv == "auto" else config.conv
        plan = Plan(conv, config.chunk or recorded.chunk)
    rounds = inputs.rounds(plan)
    try:
        state = _state_shapes(inputs, rounds, start)
    except TypeError as error:
        if not inputs.swept:
            raise
        single = Phase(inputs, plan, rounds).select([0])  # may raise the same error
        _state_shapes(single.inputs, single.rounds, start and sweep.shapes_of_one(start))
        names = _untraceable(inputs, plan, start)
        text = " or ".join(names)
        raise sweep.SeparateRunsError(
            names,
            f"{text} cannot differ in one program ({text} shapes the program, or Python chooses "
            "by its number what is computed); run its values one by one",
        ) from error
    while config.memory_gb is not None:
        needed = _memory_gb(inputs, rounds, state)
        if needed <= config.memory_gb:
            break
        if plan.chunk == 1 or config.chunk:
            runs = "fewer seeds or values of the sweep, " if len(inputs.configs) > 1 else ""
            raise UsageError(
                f"with {plan.chunk} of {clients} clients at a time this needs about {needed:.3g} "
                f"GB, and memory_gb is {config.memory_gb}; use fewer clients, {runs}a smaller "
                f"{'chunk, ' if plan.chunk > 1 else ''}model or batch_size"
            )
        plan = Plan(plan.conv, plan.chunk // 2)
        rounds = inputs.rounds(plan)
    return Phase(inputs, plan, rounds), state


def _untraceable(inputs: PhaseInputs, plan: Plan, start: Any) -> Sequence[str]:
    """Returns the swept settings that fail alone as traced values, or all if none does."""
    names = []
    for name in inputs.swept if len(inputs.swept) > 1 else ():
        single = dataclasses.replace(inputs, swept=[name])
        try:
            _state_shapes(single, single.rounds(plan), start)
        except TypeError:
            names.append(name)
    return names or inputs.swept


def _state_shapes(inputs: PhaseInputs, rounds: CompiledRounds, start: Any) -> Any:
    """Returns the shapes of a phase's state; `start` is as for `_fit_memory`.

    Raises TypeError if a round or evaluation cannot be traced with the swept settings.
    """
    state = jax.eval_shape(rounds.init, jax.eval_shape(inputs.key), start)
    if inputs.swept:
        _trace(inputs, rounds, state)
    return state


def _trace(inputs: PhaseInputs, rounds: CompiledRounds, state: Any) -> None:
    """Traces a round and an evaluation for a `state` of shapes; any error of JAX passes."""
    key, number = jax.eval_shape(inputs.key), jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(rounds.run, key, state, inputs.program_examples, number, number)
    jax.eval_shape(rounds.evaluate, key, state, inputs.program_examples, number)


def fixed_length_reason(experiment: Experiment) -> str:
    """Returns why more rounds in the last phase would change its finished rounds, or ""."""
    last = experiment.phases[-1]
    if last.config.learning_rate_drops:
        return "learning_rate_drops are fractions of all rounds"
    if last.config.learning_rate_schedule != "constant" and last.config.schedule_over == "rounds":
        return "learning_rate_schedule is over all rounds"
    for statement in experiment.statements:
        if statement.fixed_length:
            return statement.fixed_length
    factory = last.inputs.registry.algorithm[last.config.algorithm]
    if "rounds" in inspect.signature(factory).parameters:
        return f"{last.config.algorithm} has a schedule over all rounds"
    return ""


def _memory_gb(inputs: PhaseInputs, rounds: CompiledRounds, state: Any) -> float:
    """Estimates the peak GB of a round or evaluation plus a copy of the state, given as shapes."""
    key, number = jax.eval_shape(inputs.key), jax.ShapeDtypeStruct((), jnp.int32)
    examples = inputs.program_examples
    run = memory_estimate.peak_bytes(rounds.run, key, state, examples, number, number)
    evaluate = memory_estimate.peak_bytes(rounds.evaluate, key, state, examples, number)
    return (_MEMORY_FACTOR * max(run, evaluate) + memory_estimate.tree_bytes(state)) / 1e9
