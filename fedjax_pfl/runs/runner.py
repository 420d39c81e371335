"""Runs from a configuration: with a run directory, checkpoints, resume and a report."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
from ml_collections import ConfigDict

from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.arguments import unknown_argument
from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.report import loggers, method_labels, run_reader
from fedjax_pfl.runs import (
    checkpoints,
    progress,
    reference_runs,
    run_directory,
    run_partitions,
    sweep_settings,
)
from fedjax_pfl.runs.build import Experiment, build, fixed_length_reason
from fedjax_pfl.runs.example_facts import example_facts
from fedjax_pfl.runs.interrupt import Stop, on_keyboard
from fedjax_pfl.runs.result import Result, make_result, run_record, write_report
from fedjax_pfl.runs.resume import group_by_checkpoint, resume
from fedjax_pfl.runs.run_partitions import PARTITION_SEED
from fedjax_pfl.runs.run_state import SweepRun, reset, sync_files
from fedjax_pfl.runs.training_loop import NO_CALLBACKS, Callbacks, train
from fedjax_pfl.settings import configuration, custom, general, selection
from fedjax_pfl.simulation import execution_plan, multiprocess
from fedjax_pfl.simulation.sweep import SeparateRunsError


def _ignore(message: str) -> None:
    """Ignores progress messages (the default)."""


def run(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | Path | None = None,
    stop: Stop | None = None,
    *,
    on_round: Callable[..., Any] | None = None,
    on_evaluation: Callable[..., Any] | None = None,
    **components: Unpack[custom.UserComponents],
) -> Result:
    """Trains and evaluates one run from a configuration, or resumes it from its directory.

    Args:
      config: Settings; a missing one has its default.
      workdir: Run directory. Default: nothing is written, and the run cannot be resumed.
      stop: Asked after every compiled call whether to save and raise Stopped.
      on_round: Called as on_round(t, log) with the `RoundLog` of every round, one compiled call
        per round. If it returns False, the run is saved and ends.
      on_evaluation: Called as on_evaluation(line) after every evaluation with its line of
        metrics.jsonl. If it returns False, the run is saved and ends.
      dataset: User-defined examples from `fedjax_pfl.arrays`; their name is the setting `dataset`.
        A run directory resumes with the same examples only.
      algorithm: User-defined factory NAME(model, training, federation, *, its settings) ->
        Algorithm. The configuration may refer to it by name, also in a phase, and holds its
        settings under that name. It is the run's algorithm if the configuration names none.
      model: User-defined network: a linen module or its class, an NNX module's class, or a function
        NAME(*, outputs, rngs, its settings) that returns one and takes the arguments that it needs.
        BatchNorm gets the mask of a batch, Dropout gets random keys.
      task: User-defined task NAME(outputs, *, its settings) -> Task.
      optimizer: User-defined optimiser of the clients with its learning rate, such as
        optax.adamw(1e-3). It may use gradients and parameters only.
      server_optimizer: User-defined optimiser of the server, instead of replacing the model by the
        mean of the uploads.
    """
    if isinstance(config, Mapping | ConfigDict):  # run_all refuses other configs and other seeds
        seeds = config.get("seeds")
        if (isinstance(seeds, int) and seeds > 1) or config.get("sweep"):
            raise UsageError("seeds and sweep request several runs; use run_all")

    def without_name(callback: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return None if callback is None else lambda name, *arguments: callback(*arguments)

    results = run_all(
        config,
        workdir,
        stop,
        on_round=without_name(on_round),
        on_evaluation=without_name(on_evaluation),
        **components,
    )
    return results[""]


def run_all(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | Path | None = None,
    stop: Stop | None = None,
    *,
    tell: Callable[[str], None] = _ignore,
    on_round: Callable[..., Any] | None = None,
    on_evaluation: Callable[..., Any] | None = None,
    **components: Unpack[custom.UserComponents],
) -> dict[str, Result]:
    """Like `run`, for all the runs of `seeds` and `sweep`, in one compiled program.

    With `own_partitions`, partitions with other numbers of examples have programs of their own.

    Args:
      config: Settings.
      workdir: Folder of the run directories.
      stop: As for `run`.
      tell: Gets a line on the method and on each phase's plan before anything is compiled.
      on_round: Called as on_round(name, t, log). If it returns False for one run, all runs of its
        program end.
      on_evaluation: Called as on_evaluation(name, line); False ends the runs too.
      **components: As for `run`.

    Returns:
      Results by name of the run, such as "learning_rate=0.1,seed=3", which is also the name of its
      directory in `workdir`; a single run has the name "".
    """
    component_names = custom.UserComponents.__annotations__
    if unknown := [name for name in components if name not in component_names]:
        raise unknown_argument("run", unknown[0], component_names)
    settings_dict = config.to_dict() if isinstance(config, ConfigDict) else config
    registry, settings_dict = custom.register(settings_dict, **components)
    settings = configuration.complete(settings_dict, registry)
    multiprocess.check_settings(settings.to_dict(), general.settings_with("per_process"))
    if not isinstance(config, ConfigDict):  # a ConfigDict holds all settings, also unselected ones
        selection.check_used(settings_dict, [settings], registry)
    selection.check_owners(components.get("dataset"), [settings])
    if settings.log_to and workdir is None:
        raise UsageError("log_to is for a run with a workdir, in which it writes; give a workdir")
    loggers.from_setting(settings.log_to, workdir or "")
    configs = sweep_settings.expand(settings, registry)
    reference_runs.check_settings(settings, configs.values(), workdir, registry)
    with contextlib.ExitStack() as stack:  # one request stops all programs and reference runs
        stop = stop or stack.enter_context(on_keyboard(saves=workdir is not None))
        results = run_configs(
            configs,
            workdir,
            stop,
            registry=registry,
            tell=tell,
            callbacks=Callbacks(on_round=on_round, on_evaluation=on_evaluation),
        )
        has_references = settings.reference or settings.reference_runs
        for name, result in results.items() if has_references else ():
            _add_references(result, configs[name], stop, registry)
    return results


def _add_references(
    result: Result, settings: ConfigDict, stop: Stop | None, registry: configuration.Registry
) -> None:
    """Trains missing reference runs of a result with `settings`, and writes its report again."""
    assert result.directory is not None
    missing = reference_runs.missing_runs(run_record(result), settings, registry)
    for folder, config in missing.items():
        run_configs({"": config}, folder, stop, registry=registry)
    with run_directory.writing(result.directory):
        write_report(result)


def run_configs(
    configs: Mapping[str, ConfigDict],
    workdir: str | Path | None = None,
    stop: Stop | None = None,
    *,
    registry: configuration.Registry = configuration.BUILTINS,
    tell: Callable[[str], None] = _ignore,
    callbacks: Callbacks = NO_CALLBACKS,
) -> dict[str, Result]:
    """Trains several runs in one compiled program; they differ in seed and real-valued settings.

    Runs with their own partitions are trained in a program for each partition if necessary.

    Returns the result of each run by its name in `configs`. Raises UsageError if memory runs out.

    Args:
      configs: Complete configurations by the names of their directories in `workdir`.
      workdir: Folder of the run directories. Default: nothing is written.
      stop: Request to stop, read after every compiled call. Default: set by Ctrl-C.
      registry: Components by name, user-defined ones included.
      tell: Gets lines on the method, each phase's plan and the memory before anything is compiled.
      callbacks: User functions called after a round and after an evaluation.
    """
    sweep_runs = [SweepRun(name, config, {}) for name, config in configs.items()]
    plans = None
    if workdir is not None:
        saved = (run_directory.read_plans(Path(workdir, name)) for name in configs)
        plans = execution_plan.agreed(next(filter(None, saved), None))
    for sweep_run in sweep_runs:
        resolved = configuration.resolve(sweep_run.settings, registry)
        sweep_run.config = run_reader.as_json(resolved)
    try:
        experiment = build(*configs.values(), registry=registry, plans=plans)
    except SeparateRunsError as error:
        if error.names != (PARTITION_SEED,):
            raise
        tell(str(error))
        results = dict[str, Result]()
        for part in run_partitions.group(configs):
            results |= run_configs(
                part, workdir, stop, registry=registry, tell=tell, callbacks=callbacks
            )
        return {name: results[name] for name in configs}
    tell(method_labels.first_line([sweep_run.config for sweep_run in sweep_runs], registry))
    multiprocess.check_examples([partition.examples for partition in experiment.partitions])
    for phase in experiment.phases:
        tell(execution_plan.describe(phase.plan, phase.inputs.cohort, phase.inputs.devices))
    for statement in experiment.statements:
        tell(statement.line)
    tell(progress.memory_line(experiment.memory, experiment.phases[0].store))
    reason = functools.cache(functools.partial(fixed_length_reason, experiment))
    facts = [example_facts(experiment, number) for number in range(len(experiment.partitions))]
    metric = experiment.federation.task.metrics[0].name
    reference_runs.check_data([sweep_run.config for sweep_run in sweep_runs], facts, metric)
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(on_keyboard(saves=workdir is not None))
        writes = workdir is not None and multiprocess.lead()
        for i, sweep_run in enumerate(sweep_runs if writes else ()):
            directory = Path(workdir, sweep_run.name)  # type: ignore[arg-type]
            sweep_run.directory = stack.enter_context(
                run_directory.claim(directory, sweep_run.config, reason)
            )
            stack.callback(sweep_run.close_loggers)
            with sweep_run.writing():
                run_directory.write_examples(directory, facts[min(i, len(facts) - 1)])
        for sweep_run in sweep_runs if writes else ():  # after all are accepted
            assert sweep_run.directory is not None
            with sweep_run.writing():
                run_directory.lengthen(sweep_run.directory, sweep_run.config)
                run_directory.write_plans(sweep_run.directory, [p.plan for p in experiment.phases])
                sweep_run.store = checkpoints.open_store(sweep_run.directory / "checkpoints")
        try:
            return _execute(experiment, sweep_runs, stop, callbacks)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            line = first_line(error)[:200]
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in line:
                runs = ", or fewer seeds or values at a time" if len(sweep_runs) > 1 else ""
                raise UsageError(
                    f"out of memory ({line}); resume with a smaller chunk or checkpoint_every"
                    f"{runs}, or start again with a smaller batch_size or model"
                ) from error
            raise


def _execute(
    experiment: Experiment, sweep_runs: Sequence[SweepRun], stop: Stop, callbacks: Callbacks
) -> dict[str, Result]:
    """Resumes or starts every run, trains unfinished runs, and writes all records.

    Returns the results by name of the run. `experiment` has all runs, in the order of `sweep_runs`.
    """
    end, states = experiment.phases[-1].end, dict[str, State]()
    for i, sweep_run in enumerate(sweep_runs):
        reset(experiment, sweep_run)
        if multiprocess.agree(sweep_run.store is not None and end in sweep_run.store.steps()[:1]):
            restored = resume(experiment.select([i]), [sweep_run]) or []
            states |= zip([sweep_run.name], restored, strict=True)
            sync_files(sweep_run)
    unfinished = [i for i, sweep_run in enumerate(sweep_runs) if sweep_run.at.round < end]
    for i in unfinished:
        if directory := sweep_runs[i].directory:
            with sweep_runs[i].writing():
                run_directory.write_provenance(directory)
                # The report of a run that a callback ended is not that of the whole run.
                (directory / run_reader.REPORT).unlink(missing_ok=True)
    # Finished runs are not computed again, and runs with later checkpoints do not wait for others.
    steps = [
        set(store.steps()) if (store := sweep_runs[i].store) else set[int]() for i in unfinished
    ]
    for group in multiprocess.agree(group_by_checkpoint(steps)):
        numbers = [unfinished[n] for n in group]
        program, group_runs = experiment.select(numbers), [sweep_runs[i] for i in numbers]
        trained = train(program, group_runs, resume(program, group_runs), stop, callbacks)
        states |= zip((sweep_run.name for sweep_run in group_runs), trained, strict=True)
    results = {}
    for i, sweep_run in enumerate(sweep_runs):
        result = make_result(experiment.select([i]), sweep_run, states[sweep_run.name])
        results[sweep_run.name] = result
        if not sweep_run.directory:
            continue
        with sweep_run.writing():
            run_directory.write_clients(sweep_run.directory, result.clients)
            run_directory.write_confusion(sweep_run.directory, result.confusion)
            run_directory.write_traffic(sweep_run.directory, result.ledger)
            if reference_runs.report_outdated(run_record(result)):
                write_report(result)
    multiprocess.agree("done")
    return results
