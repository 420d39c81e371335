"""The training loop of a run: train, evaluate, record, report progress and save, phase by phase.

A program computes one run or, in a sweep, several runs, which have the same round.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.runs import progress
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.runs.interrupt import Stop, Stopped
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.phase_inputs import next_boundary
from fedjax_pfl.runs.resume import can_save_checkpoint, save_checkpoint
from fedjax_pfl.runs.run_state import (
    SweepRun,
    append_evaluation,
    new_warnings,
    record_evaluation,
    sync_files,
)
from fedjax_pfl.simulation import ledger, multiprocess, speeds, spread, summaries
from fedjax_pfl.simulation.on_device import DeviceProgram
from fedjax_pfl.simulation.programs import with_examples
from fedjax_pfl.simulation.records import Evaluation, Log
from fedjax_pfl.simulation.simulation import round_log
from fedjax_pfl.simulation.streamed import StreamedProgram


class Callbacks(NamedTuple):
    """User functions that are called while a run trains. If one returns False, the run ends.

    on_round: Called with (name of the run, round, RoundLog); the name of a single run is "".
    on_evaluation: Called with (name of the run, line of metrics.jsonl).
    """

    on_round: Callable[..., Any] | None = None
    on_evaluation: Callable[..., Any] | None = None


NO_CALLBACKS = Callbacks()


class Loop(NamedTuple):
    """Inputs of the training loop of a phase, besides the state."""

    experiment: Experiment
    phase: Phase
    program: DeviceProgram | StreamedProgram  # client state on the devices, or off them
    sweep_runs: Sequence[SweepRun]  # the runs that the program computes, one if no sweep
    stop: Stop  # request to stop
    callbacks: Callbacks
    bar: Any  # progress bar of tqdm


class Call(NamedTuple):
    """Outcome of one call of the compiled rounds, and of the evaluation after it if one is due."""

    begin: int  # number of finished rounds before the call
    end: int  # and after it
    logs: tuple[Log, ...]  # of each group; axes: runs of a sweep if several, rounds, slots
    scores: Evaluation | None  # with a leading axis of runs if several; None if not due
    triggered: Evaluation | None  # the same on test examples with the trigger of a backdoor
    train_seconds: float
    evaluate_seconds: float


def train(
    experiment: Experiment,
    sweep_runs: Sequence[SweepRun],
    states: Sequence[State] | None,
    stop: Stop,
    callbacks: Callbacks = NO_CALLBACKS,
) -> list[State]:
    """Trains runs of one program to the end of the last phase, or until a callback ends them.

    The runs are at the same round; their positions and files are updated. `states` are their states
    at this round, None at the start. If `stop` is set after a compiled call, the runs are saved and
    Stopped is raised. Returns the state of each run.
    """
    for sweep_run in sweep_runs:
        sync_files(sweep_run)
    state = None if states is None else _stack(states)
    bar = tqdm(
        total=experiment.phases[-1].end,
        initial=sweep_runs[0].at.round,
        unit="round",
        disable=not (multiprocess.lead() and sys.stderr.isatty()),
        dynamic_ncols=True,
    )
    with bar:
        for line in experiment.remarks if multiprocess.lead() else ():
            bar.write(line, file=sys.stderr)
        for number in range(sweep_runs[0].at.phase, len(experiment.phases)):
            phase = experiment.phases[number]
            program = phase.program(sweep_runs[0].directory)
            if sweep_runs[0].at.phase < number or state is None:
                state = program.init(state)
                for sweep_run in sweep_runs:
                    at = sweep_run.at._replace(phase=number, best_round=None, best_score=None)
                    sweep_run.at, sweep_run.best = at, None
            if sweep_runs[0].at.round < phase.end:
                loop = Loop(
                    experiment=experiment,
                    phase=phase,
                    program=program,
                    sweep_runs=sweep_runs,
                    stop=stop,
                    callbacks=callbacks,
                    bar=bar,
                )
                state, is_ended = _train_phase(loop, state)
                if is_ended:
                    break
    gathered = state and spread.gathered(state)
    return [_state_of(gathered, i, sweep_runs) for i in range(len(sweep_runs))]


def _train_phase(loop: Loop, state: State) -> tuple[State, bool]:
    """Trains to the end of a phase. Returns the state, and True if a callback ended the run.

    Raises Stopped after Ctrl-C, with the state saved.
    """
    state = loop.program.enter(state)
    _compile(loop, state)
    while loop.sweep_runs[0].at.round < loop.phase.end:
        with loop.stop.protected():
            state, call = _train_and_evaluate(loop, state)
            is_ended = False
            for i, sweep_run in enumerate(loop.sweep_runs):
                _record(loop, sweep_run, i, state, call)
                is_ended |= _call_back(loop, sweep_run, i, call)
            _report_progress(loop, call)
            exit_status, is_ended = _save_if_due(loop, state, call, is_ended)
        if exit_status:
            raise Stopped(call.end, exit_status, loop.stop.caller)
        if is_ended:
            return state, True
    return state, False


def _compile(loop: Loop, state: State) -> None:
    """Compiles training and evaluation, and adds the seconds to the runs' compile time."""
    if multiprocess.lead():
        if sys.stderr.isatty():
            loop.bar.set_postfix_str("compiling")
        else:
            print("compiling", file=sys.stderr, flush=True)
    start = time.perf_counter()
    loop.program.compile(state, loop.sweep_runs[0].at.round)
    multiprocess.agree("compiled")
    seconds = (time.perf_counter() - start) / len(loop.sweep_runs)
    for sweep_run in loop.sweep_runs:
        total = sweep_run.at.compile_seconds + seconds
        sweep_run.at = sweep_run.at._replace(compile_seconds=total)


def _train_and_evaluate(loop: Loop, state: State) -> tuple[State, Call]:
    """Runs the rounds up to the next evaluation or checkpoint, and evaluates if due.

    Runs one round only if there is an `on_round`. `state` is of all runs.
    """
    config, phase, begin = loop.phase.config, loop.phase, loop.sweep_runs[0].at.round
    end = begin + 1 if loop.callbacks.on_round else next_boundary(config, phase.begin, begin)
    start = time.perf_counter()
    state, logs = loop.program.run(state, begin, end - begin)
    trained = time.perf_counter()
    is_due = (end - phase.begin) % config.eval_every == 0 or end == phase.end
    scores = loop.program.evaluate(state, end) if is_due else None
    examples = phase.inputs.triggered if is_due else None
    triggered = examples and with_examples(loop.program, examples).evaluate(state, end)
    call = Call(
        begin=begin,
        end=end,
        logs=logs,
        scores=scores,
        triggered=triggered,
        train_seconds=trained - start,
        evaluate_seconds=time.perf_counter() - trained,
    )
    return state, call


def _record(loop: Loop, sweep_run: SweepRun, i: int, state: State, call: Call) -> None:
    """Updates position and files of run `i`, and prints its warnings. `state` is of all runs."""
    count, rounds = len(loop.sweep_runs), call.end - call.begin
    logs = _part(call.logs, i, loop.sweep_runs)
    messages = list(summaries.rejections(logs, call.begin, rounds))
    uncounted = 1 if call.begin == 0 and not loop.phase.config.count_initial_download else 0
    seconds = (call.train_seconds + call.evaluate_seconds) / count
    sweep_run.at = sweep_run.at._replace(
        round=call.end,
        seconds=sweep_run.at.seconds + seconds,
        evaluate_seconds=sweep_run.at.evaluate_seconds + call.evaluate_seconds / count,
        ledger=ledger.add(sweep_run.at.ledger, logs, rounds, uncounted),
        pending=summaries.gather(sweep_run.at.pending, logs, rounds, loop.phase.inputs.is_attacker),
        simulated_seconds=speeds.elapsed(logs, rounds, sweep_run.at.simulated_seconds),
        late=sweep_run.at.late + speeds.late(logs, rounds),
    )
    if call.scores is not None:
        run_state = _state_of(state, i, loop.sweep_runs)
        scores = _part(call.scores, i, loop.sweep_runs)
        observed = loop.program.observe(loop.phase.algorithms[i], run_state)
        triggered = call.triggered and _part(call.triggered, i, loop.sweep_runs)
        line = record_evaluation(loop.experiment, sweep_run, scores, run_state, observed, triggered)
        messages += [f"round {call.end}: {warning}" for warning in new_warnings(sweep_run)]
        messages += progress.not_finite(loop.experiment, sweep_run, scores)
        append_evaluation(sweep_run, observed, line)
    for message in messages if multiprocess.lead() else ():
        loop.bar.write(progress.with_run_name(sweep_run, message), file=sys.stderr)


def _call_back(loop: Loop, sweep_run: SweepRun, i: int, call: Call) -> bool:
    """Calls the user's functions for run `i`. Returns True if one of them returned False."""
    results = []
    if loop.callbacks.on_round:
        logs = _part(call.logs, i, loop.sweep_runs)
        for t in range(call.begin, call.end):
            is_free = t == 0 and not loop.phase.config.count_initial_download
            log = round_log(logs, t - call.begin, is_free_download=is_free)
            results.append(loop.callbacks.on_round(sweep_run.name, t, log))
    if loop.callbacks.on_evaluation and call.scores is not None:
        results.append(loop.callbacks.on_evaluation(sweep_run.name, sweep_run.at.metrics[-1]))
    # NumPy's False too: comparisons of the arrays in a log return it.
    return any(isinstance(result, bool | np.bool_) and not result for result in results)


def _report_progress(loop: Loop, call: Call) -> None:
    """Updates the progress bar after a call of the compiled rounds.

    If stderr is no terminal, prints a line for an evaluation instead.
    """
    if call.scores is not None:
        metric = loop.experiment.federation.task.metrics[0]
        lines = [sweep_run.at.metrics[-1] for sweep_run in loop.sweep_runs]
        loop.bar.set_postfix({metric.name: progress.mean_score(metric, lines, "before")})
        if multiprocess.lead() and not sys.stderr.isatty():
            message = progress.evaluation_line(metric, lines, loop.experiment.phases[-1].end)
            loop.bar.write(message, file=sys.stderr)
            sys.stderr.flush()
    loop.bar.update(call.end - call.begin)


def _save_if_due(loop: Loop, state: State, call: Call, is_ended: bool) -> tuple[int, bool]:
    """Saves checkpoints if they are due, or if the run stops here.

    `is_ended` is True if a callback of this process ended the run. Returns the exit status of a
    requested stop, 0 if there is none, and True if a callback of any process ended the run.
    """
    config, rounds, exit_status = loop.phase.config, call.end - loop.phase.begin, 0
    if config.checkpoint_every:
        is_due = rounds % config.checkpoint_every == 0
    else:
        is_due = rounds % config.eval_every == 0 and can_save_checkpoint(loop.sweep_runs)
    is_due |= call.end == loop.phase.end
    if call.end < loop.experiment.phases[-1].end:
        requests = [loop.stop.exit_status, is_ended, is_due]
        exit_status, is_ended, is_due = multiprocess.agree(requests, _decide)
    if is_due or is_ended or exit_status:
        for i, sweep_run in enumerate(loop.sweep_runs):
            save_checkpoint(sweep_run, _state_of(state, i, loop.sweep_runs))
    return exit_status, is_ended


def _decide(requests: Sequence[tuple[int, bool, bool]]) -> tuple[int, bool, bool]:
    """Combines (exit status, is_ended, is_due) of every process into one such tuple for all.

    Any process can request a stop or end the run; process 0 decides whether checkpoints are due.
    """
    exit_status = max(status for status, _, _ in requests)
    return exit_status, any(is_ended for _, is_ended, _ in requests), requests[0][2]


def _stack(states: Sequence[State]) -> State:
    """Stacks the states of several runs on a new first axis; returns a single state unchanged."""
    if len(states) == 1:
        return states[0]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def _part(tree: PyTree, i: int, sweep_runs: Sequence[SweepRun]) -> PyTree:
    """Returns row `i` of NumPy arrays with a leading axis of runs; of one run, the tree itself."""
    return tree if len(sweep_runs) == 1 else trees.row(tree, i)


# One compiled program instead of one per operation and shape.
_compiled_row = jax.jit(trees.row)


def _state_of(state: PyTree, i: int, sweep_runs: Sequence[SweepRun]) -> PyTree:
    """Returns row `i` of device arrays with a leading axis of runs; of one run, the tree itself."""
    return state if len(sweep_runs) == 1 else _compiled_row(state, np.int32(i))
