"""The host's loop around compiled rounds: run, evaluate, save, resume, report."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from fedjax_pfl import checkpoints, data, ledger, metrics, own, report, rundir, tensorboard
from fedjax_pfl import config as configuration
from fedjax_pfl.algorithm import Algorithm, Federation, PyTree, State
from fedjax_pfl.build import Built, Phase, boundary, build
from fedjax_pfl.data.picture import draw_partition
from fedjax_pfl.errors import UsageError
from fedjax_pfl.interrupt import Stop, Stopped
from fedjax_pfl.ledger import Ledger


class Position(NamedTuple):
    """Where a run stands, but for the states; plain data, saved in every checkpoint."""

    phase: int = 0
    round: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    ledger: Ledger = ledger.empty(0)
    pending: tuple[dict[str, float], int] = ({}, 0)  # training metrics since the last evaluation
    metrics: tuple[dict[str, Any], ...] = ()
    clients: tuple[dict[str, Any], ...] = ()  # rows of the last evaluation
    best_round: int | None = None  # in this phase, by validation
    best_score: float | None = None


class Result(NamedTuple):
    """What a run leaves behind."""

    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # one per evaluation, as in metrics.jsonl
    clients: list[dict[str, Any]]  # one per client, as in clients.csv
    ledger: Ledger
    state: State
    best: State | None  # of the last phase, by validation; None without validation examples
    phases: tuple[Phase, ...]
    data: data.FederatedData
    federation: Federation
    directory: Path | None
    observations: rundir.Observations  # what the algorithm shows of its state
    resumed_at: int | None  # the round that a resumed run went on from


def run(
    config: ConfigDict | Mapping[str, Any],
    workdir: str | Path | None = None,
    stop: Stop | None = None,
    *,
    dataset: data.Dataset | None = None,
    algorithm: Callable[..., Algorithm] | None = None,
) -> Result:
    """Train and evaluate what a configuration says; go on where the directory already has a part.

    Args:
      config: settings; those that are not given are at their defaults.
      workdir: the run directory; None: nothing is written, and nothing can be resumed.
      stop: asked after every call; where it says so, what there is gets saved and Stopped raised.
      dataset: your own examples, as `arrays` makes them; what `dataset` is then called in the
        configuration is their name. A run directory goes on with the same examples only.
      algorithm: your own factory, NAME(model, task, training, federation, *, its settings) ->
        Algorithm. The configuration may call it by its name, in a phase too, and holds its
        settings under that name; it is the run's algorithm where none is given.
    """
    given = config.to_dict() if isinstance(config, ConfigDict) else config
    words, given = own.added(given, dataset, algorithm)
    settings = configuration.complete(given, words)
    built = build(settings, words)
    plain = json.loads(json.dumps(configuration.resolved(settings, words)))
    stop = stop or Stop()
    with contextlib.ExitStack() as kept:
        directory = None
        if workdir is not None:
            directory = kept.enter_context(rundir.claimed(Path(workdir), plain))
        try:
            return _execute(built, settings, plain, directory, stop)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            line = (str(error).splitlines() or ["MemoryError"])[0][:200]
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in line:
                raise UsageError(
                    f"there is too little memory ({line}); go on with a smaller chunk or "
                    "checkpoint_every, or begin anew with a smaller batch_size or model"
                ) from error
            raise


def _execute(
    built: Built, config: ConfigDict, plain: dict[str, Any], directory: Path | None, stop: Stop
) -> Result:
    key = jax.random.key(config.seed)
    store = None
    if directory:
        with rundir.writing(directory):
            store = checkpoints.open_store(directory / "checkpoints")
    start = Position(ledger=ledger.empty(built.federation.clients))
    at, state, best = _resume(built, key, store, start) if store else (start, None, None)
    resumed_at = at.round if state is not None else None
    seen: rundir.Observations = {}
    if directory:
        with rundir.writing(directory, store and store.steps):
            rundir.write_metrics(directory, list(at.metrics))
            if config.tensorboard:
                tensorboard.write(directory, at.metrics)
            seen = rundir.read_observations(directory, at.round)

    bar = tqdm(
        total=built.phases[-1].end,
        initial=at.round,
        unit="round",
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
    )
    with bar:
        for number in range(at.phase, len(built.phases)):
            phase = built.phases[number]
            if at.phase < number or state is None:
                state = phase.rounds.init(phase.rounds.place(key), state)
                at, best = at._replace(phase=number, best_round=None, best_score=None), None
            if at.round < phase.end:
                at, state, best = _one_phase(
                    built, config, phase, key, at, state, best, seen, store, directory, bar, stop
                )
    assert state is not None  # there is at least one phase
    result = Result(
        plain,
        list(at.metrics),
        metrics.client_table(built.federation, at.clients, at.ledger),
        at.ledger,
        state,
        best,
        built.phases,
        built.data,
        built.federation,
        directory,
        seen,
        resumed_at,
    )
    if directory and not (directory / "report.html").exists():
        with rundir.writing(directory, store and store.steps):
            rundir.write_clients(directory, result.clients)
            rundir.write_traffic(directory, result.ledger)
            partition = draw_partition(built.data, built.federation)
            report.write(directory, {"partition": partition})
    return result


def _one_phase(
    built: Built,
    config: ConfigDict,
    phase: Phase,
    key: jax.Array,
    at: Position,
    state: State,
    best: State | None,
    seen: rundir.Observations,
    store: checkpoints.Store | None,
    directory: Path | None,
    bar: Any,
    stop: Stop,
) -> tuple[Position, State, State | None]:
    """Run a phase from where it stands to its end."""
    place, one = phase.rounds.place, phase.config
    key, arrays, state = place((key, built.data, state))
    number = lambda value: place(jnp.asarray(value, jnp.int32))

    began = time.perf_counter()
    zero = number(0)
    run_rounds = phase.rounds.run.lower(key, state, arrays, zero, zero).compile()
    evaluate = phase.rounds.evaluate.lower(key, state, arrays, zero).compile()
    observe = jax.jit(phase.algorithm.observe)
    at = at._replace(compile_seconds=at.compile_seconds + time.perf_counter() - began)

    while at.round < phase.end:
        with stop.held():
            began = time.perf_counter()
            until = boundary(one, phase.begin, at.round)
            rounds = until - at.round
            state, logs = run_rounds(key, state, arrays, number(at.round), number(rounds))
            logs = jax.device_get(jax.block_until_ready(logs))
            free = 1 if at.round == 0 and not config.count_initial_download else 0
            for warning in metrics.rejections(logs, at.round, rounds):
                bar.write(warning, file=sys.stderr)
            at = at._replace(
                round=until,
                ledger=ledger.add(at.ledger, logs, rounds, free),
                pending=metrics.gather(at.pending, logs, rounds),
            )
            if (until - phase.begin) % one.eval_every == 0 or until == phase.end:
                scores = jax.device_get(evaluate(key, state, arrays, number(until)))
                at = at._replace(seconds=at.seconds + time.perf_counter() - began)
                at, line, better = _measured(built, at, scores)
                if better:
                    best = jax.tree.map(np.array, jax.device_get(state))
                for name, values in jax.device_get(observe(state)).items():
                    rounds_seen, values_seen = seen.setdefault(name, ([], []))
                    rounds_seen.append(until)
                    values_seen.append(values)
                if directory:
                    with rundir.writing(directory, store and store.steps):
                        rundir.append_metrics(directory, line)
                        if config.tensorboard:
                            tensorboard.append(directory, line)
                        rundir.write_observations(directory, seen)
                bar.set_postfix(
                    {built.task.name: f"{line['before'][built.task.name + '_mean']:.4f}"}
                )
            else:
                at = at._replace(seconds=at.seconds + time.perf_counter() - began)
            bar.update(rounds)
            every = one.checkpoint_every or one.eval_every
            due = (until - phase.begin) % every == 0 or until == phase.end
            saved = {"state": state} if best is None else {"state": state, "best": best}
            facts = at._asdict() | {"ledger": at.ledger._asdict()}
            if store and due:
                with rundir.writing(directory, store.steps):
                    store.save(until, saved, facts)
            stopping = stop.asked if until < built.phases[-1].end else 0
            if store and stopping and not due:
                with rundir.writing(directory, store.steps):
                    store.save(until, saved, facts)
        if stopping:
            raise Stopped(until, stopping)
    return at, state, best


def _measured(built: Built, at: Position, scores: Any) -> tuple[Position, dict[str, Any], bool]:
    """The line of one evaluation, and whether it is the phase's best by validation."""
    active = built.phases[at.phase].federation.active
    validation = metrics.summary(scores.validation, active, built.task.name)
    score = validation[f"{built.task.name}_mean"] if validation else None
    better = score is not None and (at.best_score is None or score > at.best_score)
    if better:
        at = at._replace(best_round=at.round, best_score=score)
    line = {
        "round": at.round,
        "phase": at.phase,
        "seconds": round(at.seconds, 3),
        "compile_seconds": round(at.compile_seconds, 3),
        **metrics.means(at.pending),
        "before": metrics.summary(scores.before, active, built.task.name),
        "after": scores.after and metrics.summary(scores.after, active, built.task.name),
        "validation": validation,
        "bytes_down": at.ledger.total_down,
        "bytes_up": at.ledger.total_up,
        "dropped": sum(at.ledger.dropped),
        "rejected": sum(at.ledger.rejected),
        "best_round": at.best_round,
    }
    rows = metrics.client_scores(scores, built.task.name)
    return at._replace(metrics=(*at.metrics, line), clients=rows, pending=({}, 0)), line, better


def _resume(
    built: Built, key: jax.Array, store: checkpoints.Store, start: Position
) -> tuple[Position, PyTree, PyTree]:
    """The newest checkpoint that is whole; the start where there is none at all."""
    templates, template, damaged = [], None, []
    for phase in built.phases:
        template = jax.eval_shape(phase.rounds.init, key, template)
        templates.append(template)
    for step in store.steps():
        try:
            store.check(step)
            facts = store.facts(step)
            at = Position(**facts)._replace(ledger=ledger.from_json(facts["ledger"]))
            wanted = {"state": templates[at.phase]}
            if at.best_round is not None:
                wanted["best"] = templates[at.phase]
            found = store.restore(step, wanted)
        except checkpoints.DamagedError as error:
            damaged.append((step, error))
            continue
        for worse, reason in damaged:
            print(f"The checkpoint of round {worse} is damaged: {reason}. Going on from round "
                  f"{step}.", file=sys.stderr)  # fmt: skip
            store.drop(worse)
        state = built.phases[at.phase].rounds.place(found["state"])
        return at, state, found.get("best")
    if damaged:
        raise UsageError(
            f"all checkpoints in {store.folder} are damaged (round {damaged[0][0]}: "
            f"{damaged[0][1]}); bring one back from a copy, or delete that folder to start again"
        )
    return start, None, None
