"""The host's loop around compiled rounds: run, evaluate, save, resume, report."""

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import method_labels, tensorboard
from fedjax_pfl.runs import beside, checkpoints, points, progress, run_directory
from fedjax_pfl.runs.build import Experiment, build, described, fixed_length
from fedjax_pfl.runs.interrupt import Stop, Stopped, on_keyboard
from fedjax_pfl.runs.phase import Phase, boundary
from fedjax_pfl.runs.result import Result, recorded, write_report
from fedjax_pfl.runs.resume import can_save_checkpoint, group_by_checkpoint, resume, save_checkpoint
from fedjax_pfl.runs.run_state import (
    SweepRun,
    append_evaluation,
    client_table,
    new_warnings,
    record_evaluation,
    reset,
    sync_files,
)
from fedjax_pfl.settings import configuration, custom, general, selection
from fedjax_pfl.simulation import execution_plan, ledger, metrics, multiprocess, spread
from fedjax_pfl.simulation.on_device import OnDevice
from fedjax_pfl.simulation.streamed import Streamed


def _silent(line: str) -> None:
    """Where nobody asked to be told."""


def run(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | Path | None = None,
    stop: Stop | None = None,
    **brought: Unpack[custom.UserComponents],
) -> Result:
    """Train and evaluate what a configuration says; go on where the directory already has a part.

    Args:
      config: settings; those that are not given are at their defaults.
      workdir: the run directory; None: nothing is written, and nothing can be resumed.
      stop: asked after every call; where it says so, what there is gets saved and Stopped raised.
      dataset: your own examples, as `arrays` makes them; what `dataset` is then called in the
        configuration is their name. A run directory goes on with the same examples only.
      algorithm: your own factory, NAME(model, training, federation, *, its settings) ->
        Algorithm. The configuration may call it by its name, in a phase too, and holds its
        settings under that name; it is the run's algorithm where none is given.
      model: your own network, likewise: a linen module or its class, an NNX module's class, or a
        function that makes one, NAME(*, outputs, rngs, its settings), of which it takes what it
        needs. Its BatchNorm is given the mask of a batch, its Dropout random numbers.
      task: your own, likewise: NAME(outputs, *, its settings) -> Task.
      optimizer: your own for the clients, a whole one with its learning rate, such as
        optax.adamw(1e-3); it must need gradients and parameters only.
      server_optimizer: your own for the server, likewise, in place of going to the mean at once.
    """
    known = isinstance(config, Mapping | ConfigDict)  # anything else, run_all refuses
    if known and (config.get("seeds", 1) > 1 or config.get("sweep")):
        raise UsageError("seeds and sweep ask for several runs; run_all gives their results")
    return run_all(config, workdir, stop, **brought)[""]


def run_all(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | Path | None = None,
    stop: Stop | None = None,
    *,
    tell: Callable[[str], None] = _silent,
    **brought: Unpack[custom.UserComponents],
) -> dict[str, Result]:
    """As `run`, for all the runs that `seeds` and `sweep` ask for, in one compiled program.

    Args:
      tell: is given a line on each phase's plan, before anything is compiled.
      brought: your own, as for `run`.

    Returns:
      The results by the names of the runs, such as "learning_rate=0.1,seed=3", which are those of
      their directories in `workdir`; one without a name where there is one run.
    """
    given = config.to_dict() if isinstance(config, ConfigDict) else config
    words, given = custom.added(given, **brought)
    settings = configuration.complete(given, words)
    multiprocess.check_settings(settings.to_dict(), general.having("per_process"))
    if not isinstance(config, ConfigDict):  # which holds all settings, whoever gave them
        selection.check_given(given, [settings], words)
    selection.check_owners(brought.get("dataset"), [settings])
    if settings.tensorboard:
        tensorboard.check()
    each = points.expand(settings, words)
    beside.check(settings, each.values(), workdir, words)
    results = run_points(each, workdir, stop, words=words, tell=tell)
    for name, result in results.items() if settings.reference or settings.beside else ():
        _answer(result, each[name], stop, words)
    return results


def _answer(
    result: Result, settings: ConfigDict, stop: Stop | None, words: configuration.Registry
) -> None:
    """Report again, with the runs that are given or asked for beside it."""
    assert result.directory is not None
    for folder, one in beside.missing(recorded(result), settings, words).items():
        run_points({"": one}, folder, stop, words=words)
    with run_directory.writing(result.directory):
        write_report(result)


def run_points(
    points: Mapping[str, ConfigDict],
    workdir: str | Path | None = None,
    stop: Stop | None = None,
    *,
    words: configuration.Registry = configuration.BUILTINS,
    tell: Callable[[str], None] = _silent,
) -> dict[str, Result]:
    """As `run_all`, for runs that are listed: each has a seed and real-valued settings of its own.

    Args:
      points: complete configurations, by the names of their directories in `workdir`.
      words: what names in the configurations mean.
    """
    sweep_runs = [SweepRun(name, one, {}) for name, one in points.items()]
    recorded = None
    if workdir is not None:
        each = (run_directory.read_plans(Path(workdir, sweep_run.name)) for sweep_run in sweep_runs)
        recorded = execution_plan.agreed(next(filter(None, each), None))
    for sweep_run in sweep_runs:
        sweep_run.config = json.loads(json.dumps(configuration.resolved(sweep_run.settings, words)))
    experiment = build(
        *(sweep_run.settings for sweep_run in sweep_runs), words=words, plans=recorded
    )
    tell(method_labels.first_line([sweep_run.config for sweep_run in sweep_runs], words))
    multiprocess.check_examples(experiment.data)
    for phase in experiment.phases:
        tell(execution_plan.describe(phase.plan, phase.inputs.cohort, phase.inputs.devices))
    tell(f"state and examples need at least {experiment.needs}; store={experiment.phases[0].store}")
    fixed = functools.cache(functools.partial(fixed_length, experiment))
    facts = described(experiment)
    beside.check_examples([sweep_run.config for sweep_run in sweep_runs], facts)
    with contextlib.ExitStack() as kept:
        stop = stop or kept.enter_context(on_keyboard(saves=workdir is not None))
        for sweep_run in sweep_runs if workdir is not None and multiprocess.lead() else []:
            directory = Path(workdir, sweep_run.name)  # type: ignore[arg-type]
            sweep_run.directory = kept.enter_context(
                run_directory.claimed(directory, sweep_run.config, fixed)
            )
            with sweep_run.writing():
                run_directory.write_examples(directory, facts)
                run_directory.write_plans(directory, [phase.plan for phase in experiment.phases])
                sweep_run.store = checkpoints.open_store(directory / "checkpoints")
        try:
            return _execute(experiment, sweep_runs, stop)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            line = (str(error).splitlines() or ["MemoryError"])[0][:200]
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in line:
                fewer = ", or fewer seeds or points at a time" if len(sweep_runs) > 1 else ""
                raise UsageError(
                    f"there is too little memory ({line}); go on with a smaller chunk or "
                    f"checkpoint_every{fewer}, or begin anew with a smaller batch_size or model"
                ) from error
            raise


def _execute(
    experiment: Experiment, sweep_runs: Sequence[SweepRun], stop: Stop
) -> dict[str, Result]:
    end, states = experiment.phases[-1].end, dict[str, State]()
    for i, sweep_run in enumerate(sweep_runs):
        reset(experiment, sweep_run)
        if multiprocess.agree(sweep_run.store is not None and end in sweep_run.store.steps()[:1]):
            states |= zip(
                [sweep_run.name], resume(experiment.of([i]), [sweep_run]) or [], strict=True
            )
            sync_files(sweep_run)
    left = [i for i, sweep_run in enumerate(sweep_runs) if sweep_run.at.round < end]
    for i in left:
        if directory := sweep_runs[i].directory:
            with sweep_runs[i].writing():
                run_directory.write_made(directory)
    # What is finished is not computed again, and what has come further does not wait for the rest.
    saved = [set(store.steps()) if (store := sweep_runs[i].store) else set[int]() for i in left]
    for group in multiprocess.agree(group_by_checkpoint(saved)):
        which = [left[n] for n in group]
        program, some = experiment.of(which), [sweep_runs[i] for i in which]
        found = _advance(program, some, resume(program, some), stop)
        states |= zip((sweep_run.name for sweep_run in some), found, strict=True)
    results = {}
    for i, sweep_run in enumerate(sweep_runs):
        result = results[sweep_run.name] = Result(
            sweep_run.config,
            list(sweep_run.at.metrics),
            client_table(experiment, sweep_run.at),
            sweep_run.at.ledger,
            states[sweep_run.name],
            sweep_run.best,
            experiment.of([i]).phases,
            experiment.data,
            experiment.federation,
            sweep_run.directory,
            sweep_run.seen,
            sweep_run.resumed_at,
        )
        if not sweep_run.directory:
            continue
        with sweep_run.writing():
            run_directory.write_clients(sweep_run.directory, result.clients)
            run_directory.write_traffic(sweep_run.directory, result.ledger)
            if not (sweep_run.directory / "report.html").exists():
                write_report(result)
    multiprocess.agree("done")
    return results


def _advance(
    experiment: Experiment,
    sweep_runs: Sequence[SweepRun],
    states: Sequence[State] | None,
    stop: Stop,
) -> list[State]:
    """Run members that stand at the same place to the end."""
    for sweep_run in sweep_runs:
        sync_files(sweep_run)
    at = sweep_runs[0].at
    state = None if states is None else _stacked(states)
    bar = tqdm(
        total=experiment.phases[-1].end,
        initial=at.round,
        unit="round",
        disable=not (multiprocess.lead() and sys.stderr.isatty()),
        dynamic_ncols=True,
    )
    with bar:
        for line in experiment.remarks if multiprocess.lead() else ():
            bar.write(line, file=sys.stderr)
        for number in range(at.phase, len(experiment.phases)):
            phase = experiment.phases[number]
            program = phase.program(sweep_runs[0].directory)
            if sweep_runs[0].at.phase < number or state is None:
                state = program.init(state)
                for sweep_run in sweep_runs:
                    sweep_run.at = sweep_run.at._replace(
                        phase=number, best_round=None, best_score=None
                    )
                    sweep_run.best = None
            if sweep_runs[0].at.round < phase.end:
                state = _one_phase(experiment, phase, program, sweep_runs, state, bar, stop)
    return [
        _state_of(state and spread.gathered(state), i, sweep_runs) for i in range(len(sweep_runs))
    ]


def _stacked(states: Sequence[State]) -> State:
    """As a program of so many members has it: with their axis in front, where there are several."""
    if len(states) == 1:
        return states[0]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def _part(tree: PyTree, i: int, sweep_runs: Sequence[SweepRun]) -> PyTree:
    """That of one member, the inverse of `_stacked`."""
    return tree if len(sweep_runs) == 1 else trees.row(tree, i)


# Of what is on the devices: one program in place of one for each operation on each leaf's shape.
_row = jax.jit(trees.row)


def _state_of(state: PyTree, i: int, sweep_runs: Sequence[SweepRun]) -> PyTree:
    """As `_part`, of what is on the devices."""
    return state if len(sweep_runs) == 1 else _row(state, np.int32(i))


def _one_phase(
    experiment: Experiment,
    phase: Phase,
    program: OnDevice | Streamed,
    sweep_runs: Sequence[SweepRun],
    state: State,
    bar: Any,
    stop: Stop,
) -> State:
    """Run a phase from where it stands to its end."""
    one, state = phase.config, program.enter(state)
    began = time.perf_counter()
    program.compile(state, sweep_runs[0].at.round)
    multiprocess.agree("compiled")
    compiling = time.perf_counter() - began
    for sweep_run in sweep_runs:
        own = sweep_run.at.compile_seconds + compiling / len(sweep_runs)
        sweep_run.at = sweep_run.at._replace(compile_seconds=own)

    stopping = 0
    while (now := sweep_runs[0].at.round) < phase.end:
        with stop.held():
            began = time.perf_counter()
            until = boundary(one, phase.begin, now)
            rounds = until - now
            state, all_logs = program.run(state, now, rounds)
            trained = time.perf_counter()
            evaluated = (until - phase.begin) % one.eval_every == 0 or until == phase.end
            if evaluated:
                all_scores = program.evaluate(state, until)
            ended = time.perf_counter()
            for i, sweep_run in enumerate(sweep_runs):
                logs = _part(all_logs, i, sweep_runs)
                said = list(metrics.rejections(logs, now, rounds))
                free = 1 if now == 0 and not one.count_initial_download else 0
                sweep_run.at = sweep_run.at._replace(
                    round=until,
                    seconds=sweep_run.at.seconds + (ended - began) / len(sweep_runs),
                    evaluate_seconds=sweep_run.at.evaluate_seconds
                    + (ended - trained) / len(sweep_runs),
                    ledger=ledger.add(sweep_run.at.ledger, logs, rounds, free),
                    pending=metrics.gather(sweep_run.at.pending, logs, rounds),
                )
                if evaluated:
                    mine, scores = _state_of(state, i, sweep_runs), _part(all_scores, i, sweep_runs)
                    shown = program.observe(phase.algorithms[i], mine)
                    line = record_evaluation(experiment, sweep_run, scores, mine, shown)
                    said += [f"round {until}: {remark}" for remark in new_warnings(sweep_run)]
                    said += progress.not_finite(experiment, sweep_run, scores)
                    append_evaluation(sweep_run, shown, line)
                for one_line in said if multiprocess.lead() else ():
                    bar.write(progress.named(sweep_run, one_line), file=sys.stderr)
            if evaluated:
                metric, lines = (
                    experiment.federation.task.metrics[0],
                    [sweep_run.at.metrics[-1] for sweep_run in sweep_runs],
                )
                bar.set_postfix({metric.name: progress.score(metric, lines, "before")})
                if multiprocess.lead() and not sys.stderr.isatty():
                    told = progress.evaluation(metric, lines, experiment.phases[-1].end)
                    bar.write(told, file=sys.stderr)
                    sys.stderr.flush()
            bar.update(rounds)
            due = until == phase.end or _due(one, until - phase.begin, sweep_runs)
            if until < experiment.phases[-1].end:
                stopping, due = multiprocess.agree([stop.asked, due], _stop_or_save)
            if due or stopping:
                for i, sweep_run in enumerate(sweep_runs):
                    save_checkpoint(sweep_run, _state_of(state, i, sweep_runs))
        if stopping:
            raise Stopped(until, stopping, stop.call)
    return state


def _due(one: ConfigDict, done: int, sweep_runs: Sequence[SweepRun]) -> bool:
    """Whether a checkpoint is to be written after so many rounds of a phase."""
    if one.checkpoint_every:
        return done % one.checkpoint_every == 0
    return done % one.eval_every == 0 and can_save_checkpoint(sweep_runs)


def _stop_or_save(each: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
    """Any process may be asked to stop; the clock that counts is that of process 0."""
    return max(asked for asked, _ in each), each[0][1]
