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
from fedjax_pfl.runs.build import Built, build, described, fixed_length
from fedjax_pfl.runs.interrupt import Stop, Stopped, on_keyboard
from fedjax_pfl.runs.phase import Phase, boundary
from fedjax_pfl.runs.result import Result, recorded, write_report
from fedjax_pfl.runs.run_state import (
    Member,
    begin,
    checkpoints_fit,
    keep,
    measured,
    news,
    resume,
    save,
    start,
    table,
    together,
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
    **brought: Unpack[custom.Brought],
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
    **brought: Unpack[custom.Brought],
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
    result: Result, settings: ConfigDict, stop: Stop | None, words: configuration.Words
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
    words: configuration.Words = configuration.OURS,
    tell: Callable[[str], None] = _silent,
) -> dict[str, Result]:
    """As `run_all`, for runs that are listed: each has a seed and real-valued settings of its own.

    Args:
      points: complete configurations, by the names of their directories in `workdir`.
      words: what names in the configurations mean.
    """
    members = [Member(name, one, {}) for name, one in points.items()]
    recorded = None
    if workdir is not None:
        each = (run_directory.read_plans(Path(workdir, member.name)) for member in members)
        recorded = execution_plan.agreed(next(filter(None, each), None))
    for member in members:
        member.config = json.loads(json.dumps(configuration.resolved(member.settings, words)))
    built = build(*(member.settings for member in members), words=words, plans=recorded)
    tell(method_labels.first_line([member.config for member in members], words))
    multiprocess.check_examples(built.data)
    for phase in built.phases:
        tell(execution_plan.describe(phase.plan, phase.work.cohort, phase.work.devices))
    tell(f"state and examples need at least {built.needs}; store={built.phases[0].store}")
    fixed = functools.cache(functools.partial(fixed_length, built))
    facts = described(built)
    beside.check_examples([member.config for member in members], facts)
    with contextlib.ExitStack() as kept:
        stop = stop or kept.enter_context(on_keyboard(saves=workdir is not None))
        for member in members if workdir is not None and multiprocess.lead() else []:
            directory = Path(workdir, member.name)  # type: ignore[arg-type]
            member.directory = kept.enter_context(
                run_directory.claimed(directory, member.config, fixed)
            )
            with member.writing():
                run_directory.write_examples(directory, facts)
                run_directory.write_plans(directory, [phase.plan for phase in built.phases])
                member.store = checkpoints.open_store(directory / "checkpoints")
        try:
            return _execute(built, members, stop)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            line = (str(error).splitlines() or ["MemoryError"])[0][:200]
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in line:
                fewer = ", or fewer seeds or points at a time" if len(members) > 1 else ""
                raise UsageError(
                    f"there is too little memory ({line}); go on with a smaller chunk or "
                    f"checkpoint_every{fewer}, or begin anew with a smaller batch_size or model"
                ) from error
            raise


def _execute(built: Built, members: Sequence[Member], stop: Stop) -> dict[str, Result]:
    end, states = built.phases[-1].end, dict[str, State]()
    for i, member in enumerate(members):
        start(built, member)
        if multiprocess.agree(member.store is not None and end in member.store.steps()[:1]):
            states |= zip([member.name], resume(built.of([i]), [member]) or [], strict=True)
            begin(member)
    left = [i for i, member in enumerate(members) if member.at.round < end]
    for i in left:
        if directory := members[i].directory:
            with members[i].writing():
                run_directory.write_made(directory)
    # What is finished is not computed again, and what has come further does not wait for the rest.
    saved = [set(store.steps()) if (store := members[i].store) else set[int]() for i in left]
    for group in multiprocess.agree(together(saved)):
        which = [left[n] for n in group]
        program, some = built.of(which), [members[i] for i in which]
        found = _advance(program, some, resume(program, some), stop)
        states |= zip((member.name for member in some), found, strict=True)
    results = {}
    for i, member in enumerate(members):
        result = results[member.name] = Result(
            member.config,
            list(member.at.metrics),
            table(built, member.at),
            member.at.ledger,
            states[member.name],
            member.best,
            built.of([i]).phases,
            built.data,
            built.federation,
            member.directory,
            member.seen,
            member.resumed_at,
        )
        if not member.directory:
            continue
        with member.writing():
            run_directory.write_clients(member.directory, result.clients)
            run_directory.write_traffic(member.directory, result.ledger)
            if not (member.directory / "report.html").exists():
                write_report(result)
    multiprocess.agree("done")
    return results


def _advance(
    built: Built, members: Sequence[Member], states: Sequence[State] | None, stop: Stop
) -> list[State]:
    """Run members that stand at the same place to the end."""
    for member in members:
        begin(member)
    at = members[0].at
    state = None if states is None else _stacked(states)
    bar = tqdm(
        total=built.phases[-1].end,
        initial=at.round,
        unit="round",
        disable=not (multiprocess.lead() and sys.stderr.isatty()),
        dynamic_ncols=True,
    )
    with bar:
        for line in built.remarks if multiprocess.lead() else ():
            bar.write(line, file=sys.stderr)
        for number in range(at.phase, len(built.phases)):
            phase = built.phases[number]
            program = phase.program(members[0].directory)
            if members[0].at.phase < number or state is None:
                state = program.init(state)
                for member in members:
                    member.at = member.at._replace(phase=number, best_round=None, best_score=None)
                    member.best = None
            if members[0].at.round < phase.end:
                state = _one_phase(built, phase, program, members, state, bar, stop)
    return [_state_of(state and spread.gathered(state), i, members) for i in range(len(members))]


def _stacked(states: Sequence[State]) -> State:
    """As a program of so many members has it: with their axis in front, where there are several."""
    if len(states) == 1:
        return states[0]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def _part(tree: PyTree, i: int, members: Sequence[Member]) -> PyTree:
    """That of one member, the inverse of `_stacked`."""
    return tree if len(members) == 1 else trees.row(tree, i)


# Of what is on the devices: one program in place of one for each operation on each leaf's shape.
_row = jax.jit(trees.row)


def _state_of(state: PyTree, i: int, members: Sequence[Member]) -> PyTree:
    """As `_part`, of what is on the devices."""
    return state if len(members) == 1 else _row(state, np.int32(i))


def _one_phase(
    built: Built,
    phase: Phase,
    program: OnDevice | Streamed,
    members: Sequence[Member],
    state: State,
    bar: Any,
    stop: Stop,
) -> State:
    """Run a phase from where it stands to its end."""
    one, state = phase.config, program.enter(state)
    began = time.perf_counter()
    program.compile(state, members[0].at.round)
    multiprocess.agree("compiled")
    compiling = time.perf_counter() - began
    for member in members:
        own = member.at.compile_seconds + compiling / len(members)
        member.at = member.at._replace(compile_seconds=own)

    stopping = 0
    while (now := members[0].at.round) < phase.end:
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
            for i, member in enumerate(members):
                logs = _part(all_logs, i, members)
                said = list(metrics.rejections(logs, now, rounds))
                free = 1 if now == 0 and not one.count_initial_download else 0
                member.at = member.at._replace(
                    round=until,
                    seconds=member.at.seconds + (ended - began) / len(members),
                    evaluate_seconds=member.at.evaluate_seconds + (ended - trained) / len(members),
                    ledger=ledger.add(member.at.ledger, logs, rounds, free),
                    pending=metrics.gather(member.at.pending, logs, rounds),
                )
                if evaluated:
                    mine, scores = _state_of(state, i, members), _part(all_scores, i, members)
                    shown = program.observe(phase.algorithms[i], mine)
                    line = measured(built, member, scores, mine, shown)
                    said += [f"round {until}: {remark}" for remark in news(member)]
                    said += progress.not_finite(built, member, scores)
                    keep(member, shown, line)
                for one_line in said if multiprocess.lead() else ():
                    bar.write(progress.named(member, one_line), file=sys.stderr)
            if evaluated:
                metric, lines = (
                    built.federation.task.metrics[0],
                    [member.at.metrics[-1] for member in members],
                )
                bar.set_postfix({metric.name: progress.score(metric, lines, "before")})
                if multiprocess.lead() and not sys.stderr.isatty():
                    told = progress.evaluation(metric, lines, built.phases[-1].end)
                    bar.write(told, file=sys.stderr)
                    sys.stderr.flush()
            bar.update(rounds)
            due = until == phase.end or _due(one, until - phase.begin, members)
            if until < built.phases[-1].end:
                stopping, due = multiprocess.agree([stop.asked, due], _stop_or_save)
            if due or stopping:
                for i, member in enumerate(members):
                    save(member, _state_of(state, i, members))
        if stopping:
            raise Stopped(until, stopping, stop.call)
    return state


def _due(one: ConfigDict, done: int, members: Sequence[Member]) -> bool:
    """Whether a checkpoint is to be written after so many rounds of a phase."""
    if one.checkpoint_every:
        return done % one.checkpoint_every == 0
    return done % one.eval_every == 0 and checkpoints_fit(members)


def _stop_or_save(each: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
    """Any process may be asked to stop; the clock that counts is that of process 0."""
    return max(asked for asked, _ in each), each[0][1]
