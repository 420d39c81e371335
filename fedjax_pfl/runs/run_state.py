"""A run's place in time: where it stands, what it has measured, and how it is saved and resumed.

A program computes one run or, in a sweep, several: each is a member with a directory of its own.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core import diagnostics, groups
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report import tensorboard
from fedjax_pfl.runs import changed_rows, checkpoints, run_directory
from fedjax_pfl.runs.build import Experiment, fixed_length
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import ledger, metrics, multiprocess, spread, stores, sweep
from fedjax_pfl.simulation.ledger import Ledger
from fedjax_pfl.simulation.offloaded_rows import apart, names
from fedjax_pfl.simulation.records import Evaluation


class Position(NamedTuple):
    """Where a run stands, but for the states; plain data, saved in every checkpoint."""

    phase: int = 0
    round: int = 0
    seconds: float = 0.0  # its share of what all runs of its program took
    evaluate_seconds: float = 0.0  # of these
    compile_seconds: float = 0.0  # besides
    checkpoint_seconds: float = 0.0  # besides; that of this very checkpoint is not yet in it
    ledger: Ledger = ledger.empty(0)
    pending: tuple[dict[str, float], int] = ({}, 0)  # training metrics since the last evaluation
    metrics: tuple[dict[str, Any], ...] = ()
    clients: tuple[dict[str, Any], ...] = ()  # rows of the last evaluation
    best_round: int | None = None  # in this phase, by validation
    best_score: float | None = None


@dataclasses.dataclass
class SweepRun:
    """One run of those that a program computes together."""

    name: str  # among them; empty where it is alone
    settings: ConfigDict
    config: dict[str, Any]  # as it is written down
    directory: Path | None = None
    store: checkpoints.Store | None = None
    at: Position = dataclasses.field(default_factory=Position)
    best: State | None = None
    seen: run_directory.Observations = dataclasses.field(default_factory=dict)
    resumed_at: int | None = None
    last_checkpoint_seconds: float = 0.0  # what it took here, which is what the next one may take
    files: dict[int, list[str]] = dataclasses.field(default_factory=dict)  # of its checkpoints
    named: set[int] = dataclasses.field(default_factory=set)  # clients once said not to be finite

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """For what is written to its directory."""
        return run_directory.writing(self.directory, self.store and self.store.steps)


def begin(sweep_run: SweepRun) -> None:
    """Let its files say what has been measured up to where it stands, and read what was seen."""
    if sweep_run.directory:
        with sweep_run.writing():
            run_directory.write_metrics(sweep_run.directory, list(sweep_run.at.metrics))
            if sweep_run.settings.tensorboard:
                tensorboard.write(sweep_run.directory, sweep_run.at.metrics)
            sweep_run.seen = run_directory.read_observations(
                sweep_run.directory, sweep_run.at.round
            )


def save(sweep_run: SweepRun, state: State) -> None:
    """Write a checkpoint of where it stands; where there are several processes, all call this."""
    state = spread.gathered(state)
    if sweep_run.store:
        began = time.perf_counter()
        with sweep_run.writing():
            _write(sweep_run, sweep_run.store, state)
        took = sweep_run.last_checkpoint_seconds = time.perf_counter() - began
        total = sweep_run.at.checkpoint_seconds + took
        sweep_run.at = sweep_run.at._replace(checkpoint_seconds=total)


def _write(sweep_run: SweepRun, store: checkpoints.Store, state: State) -> None:
    saved = {"state": state} if sweep_run.best is None else {"state": state, "best": sweep_run.best}
    facts, clients = facts_of(sweep_run.at) | {"config": sweep_run.config}, state.clients
    if not isinstance(clients, stores.Clients):
        store.save(sweep_run.at.round, saved, facts)
        return
    best = None if sweep_run.best is None else sweep_run.best.clients
    best = best if isinstance(best, stores.Snapshot) else None  # else from a run on the device
    now = changed_rows.write(store.rows, str(sweep_run.at.round), clients, best)
    saved["state"] = state._replace(clients=())
    if best is not None:
        saved["best"] = saved["best"]._replace(clients=())
    store.save(sweep_run.at.round, saved, facts | {"rows": now._asdict()})
    changed_rows.done(clients, best, now)
    steps = store.steps()
    known = sweep_run.files | {sweep_run.at.round: [*now.files]}
    sweep_run.files = {
        step: known[step] if step in known else _files(store, step) for step in steps
    }
    changed_rows.clear(store.rows, sweep_run.files.values())


def _files(store: checkpoints.Store, step: int) -> list[str]:
    """Those that an earlier checkpoint needs."""
    try:
        return list((store.facts(step).get("rows") or {}).get("files", ()))
    except checkpoints.DamagedError:
        return []


def checkpoints_fit(sweep_runs: Sequence[SweepRun]) -> bool:
    """Whether one more checkpoint of each keeps all of them to a twentieth of the time."""
    saving = sum(m.at.checkpoint_seconds + m.last_checkpoint_seconds for m in sweep_runs)
    return saving <= sum(m.at.seconds for m in sweep_runs) / 20


def facts_of(at: Position) -> dict[str, Any]:
    """As a checkpoint holds it."""
    return at._asdict() | {"ledger": at.ledger._asdict()}


def _position(facts: Mapping[str, Any]) -> Position:
    return Position(**facts)._replace(ledger=ledger.from_json(facts["ledger"]))


def keep(sweep_run: SweepRun, observed: Mapping[str, np.ndarray], line: dict[str, Any]) -> None:
    """Keep what an evaluation showed."""
    for name, values in observed.items():
        rounds, each = sweep_run.seen.setdefault(name, ([], []))
        rounds.append(sweep_run.at.round)
        each.append(values)
    if sweep_run.directory:
        with sweep_run.writing():
            run_directory.append_metrics(sweep_run.directory, line)
            if sweep_run.settings.tensorboard:
                tensorboard.append(sweep_run.directory, line)
            run_directory.write_observations(sweep_run.directory, sweep_run.seen)


def measured(
    experiment: Experiment,
    sweep_run: SweepRun,
    scores: Evaluation,
    state: State,
    shown: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """The line of one evaluation; where it is the phase's best by validation, its state is kept.

    shown: what the method shows of its state, of which the line has the diagnostics.
    """
    at = sweep_run.at
    active = experiment.phases[at.phase].federation.active
    before = metrics.summary(scores.before, active, experiment.federation.task)
    validation = metrics.summary(scores.validation, active, experiment.federation.task)
    better = _better(experiment.federation.task.metrics[0], before, validation, at.best_score)
    if better and validation:
        score = validation[f"{experiment.federation.task.metrics[0].name}_mean"]
        at = at._replace(best_round=at.round, best_score=score)
        sweep_run.best = stores.copied(state)
    line = {
        "round": at.round,
        "phase": at.phase,
        "seconds": round(at.seconds, 3),
        "evaluate_seconds": round(at.evaluate_seconds, 3),
        "compile_seconds": round(at.compile_seconds, 3),
        "checkpoint_seconds": round(at.checkpoint_seconds, 3),
        **metrics.means(at.pending),
        "before": before,
        "after": scores.after and metrics.summary(scores.after, active, experiment.federation.task),
        "validation": validation,
        "bytes_down": at.ledger.total_down,
        "bytes_up": at.ledger.total_up,
        "dropped": sum(at.ledger.dropped),
        "rejected": sum(at.ledger.rejected),
        "best_round": at.best_round,
        **metrics.own(experiment.federation.task),
        **_diagnostics(experiment, sweep_run, shown),
    }
    evaluated = experiment.phases[at.phase].inputs.evaluated
    rows = metrics.client_scores(scores, experiment.federation.task, evaluated)
    known = at.clients if at.best_round is not None else ()  # an earlier phase's are not this one's
    rows = metrics.with_best(rows, known, better, experiment.federation.task)
    sweep_run.at = at._replace(metrics=(*at.metrics, line), clients=rows, pending=({}, 0))
    return line


def _diagnostics(
    experiment: Experiment, sweep_run: SweepRun, shown: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Returns the diagnostics of an evaluation, as its line in metrics.jsonl holds them."""
    at, phase = sweep_run.at, experiment.phases[sweep_run.at.phase]
    method = METHODS.get(phase.config.algorithm)
    if method is None or not method.diagnostics:
        return {}
    earlier = [line for line in at.metrics if line["phase"] == at.phase]
    last = earlier[-1]["round"] if earlier else None
    before = {
        name: each[-1] for name, (rounds, each) in sweep_run.seen.items() if rounds[-1] == last
    }
    begin = earlier[0]["round"] if earlier else None
    seen = sweep_run.seen.items()
    first = {name: each[rounds.index(begin)] for name, (rounds, each) in seen if begin in rounds}
    observed = diagnostics.Observed(
        now=shown, before=before, layers=list(at.ledger.down), first=first
    )
    length = phase.end - phase.begin
    return diagnostics.read(method.diagnostics, observed, earlier, at.round, length)._asdict()


def news(sweep_run: SweepRun) -> list[str]:
    """What the last evaluation remarks and the one before did not."""
    said = [line.get("remarks", []) for line in sweep_run.at.metrics[-2:]]
    before = said[0] if len(said) > 1 else []
    return [remark for remark in said[-1] if remark not in before]


def table(experiment: Experiment, at: Position) -> list[dict[str, Any]]:
    """A row for each client, at the end of a run."""
    last = experiment.phases[-1].inputs.evaluated
    return metrics.client_table(experiment.federation, at.clients, at.ledger, last)


def _better(
    metric: Metric,
    before: Mapping[str, Any] | None,
    validation: Mapping[str, Any] | None,
    best: float | None,
) -> bool:
    """Whether an evaluation is the best so offload; one of which a part is not finite never is."""
    score = None if validation is None else validation[f"{metric.name}_mean"]
    if score is None or any(part and part["not_finite"] for part in (before, validation)):
        return False
    return best is None or (score > best if metric.higher_is_better else score < best)


def start(experiment: Experiment, sweep_run: SweepRun) -> None:
    """Set it to before the first round."""
    sweep_run.at = Position(ledger=ledger.empty(experiment.federation.clients))
    sweep_run.best = sweep_run.resumed_at = None


def together(steps: Sequence[Set[int]]) -> list[list[int]]:
    """By the rounds that runs have checkpoints of: those that can go on, or begin, together."""
    groups: list[tuple[Set[int], list[int]]] = []
    for i, own in enumerate(steps):
        for n, (common, group) in enumerate(groups):
            if common & own or not common | own:
                groups[n] = common & own, [*group, i]
                break
        else:
            groups.append((own, [i]))
    return [group for _, group in groups]


def resume(experiment: Experiment, sweep_runs: Sequence[SweepRun]) -> list[State] | None:
    """The states of a program's runs at the newest checkpoint that is whole in all, or None."""
    found = _found(experiment, sweep_runs) if multiprocess.lead() else None
    facts = multiprocess.agree(found and [facts_of(sweep_run.at) for sweep_run in sweep_runs])
    if facts is None or multiprocess.count() == 1:
        return found
    template = templates(experiment)[facts[0]["phase"]]
    for sweep_run, one in zip(sweep_runs, facts, strict=True):
        sweep_run.at = _position(one)
        sweep_run.resumed_at = sweep_run.at.round
    kept = [sweep_run for sweep_run in sweep_runs if sweep_run.at.best_round is not None]
    saved = found, [sweep_run.best for sweep_run in kept]
    if not multiprocess.lead():
        empty = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), template)
        saved = [empty] * len(sweep_runs), [empty] * len(kept)
    states, best = multiprocess.broadcast(saved)
    for sweep_run, one in zip(kept, best, strict=True):
        sweep_run.best = one
    return list(states)


def _found(experiment: Experiment, sweep_runs: Sequence[SweepRun]) -> list[State] | None:
    shapes = templates(experiment)
    common = set.intersection(*(set(m.store.steps()) if m.store else set() for m in sweep_runs))
    damaged: list[tuple[int, SweepRun, str]] = []
    for step in sorted(common, reverse=True):
        found = []
        for sweep_run in sweep_runs:
            try:
                assert sweep_run.store is not None
                found.append(restored(experiment, sweep_run.store, shapes, step, sweep_run.config))
            except checkpoints.DamagedError as error:
                damaged.append((step, sweep_run, str(error)))
                break
        else:
            return _set(sweep_runs, found, step, damaged)
    for step, sweep_run, reason in damaged[:1]:
        folder = sweep_run.store and sweep_run.store.folder
        raise UsageError(
            f"all checkpoints in {folder} are damaged (round {step}: {reason}); bring one back "
            "from a copy, or delete that folder to start again"
        )
    return None


def _set(
    sweep_runs: Sequence[SweepRun],
    found: Sequence[tuple[Position, State, State | None]],
    step: int,
    damaged: Sequence[tuple[int, SweepRun, str]],
) -> list[State]:
    for worse, sweep_run, reason in damaged:
        which = f" of {sweep_run.name}" if sweep_run.name else ""
        print(
            f"The checkpoint of round {worse}{which} is damaged: {reason}. Going on from round "
            f"{step}.",
            file=sys.stderr,
        )
    _drop(sweep_runs, step)
    for sweep_run, (at, _, best) in zip(sweep_runs, found, strict=True):
        sweep_run.at, sweep_run.best, sweep_run.resumed_at = at, best, at.round
    return [state for _, state, _ in found]


def templates(experiment: Experiment) -> list[PyTree]:
    """The shapes of one run's state at the end of each phase."""
    found, state = [], None
    for phase in experiment.phases:
        state = jax.eval_shape(phase.rounds.init, phase.points, state)
        found.append(sweep.alone(state) if isinstance(phase.points, sweep.Points) else state)
    return found


def restored(
    experiment: Experiment,
    store: checkpoints.Store,
    templates: Sequence[PyTree],
    step: int,
    config: Mapping[str, Any],
) -> tuple[Position, State, State | None]:
    """Where a run stood, its state, and its best one by validation; or DamagedError.

    UsageError where the run that it is of had other settings, in what decides results.
    """
    store.check(step)
    facts = store.facts(step)
    there = facts.pop("config")
    different = configuration.differences(there, config)
    longer = configuration.longer(there, config)  # as its directory may have been made
    why = fixed_length(experiment) if different and longer else ""
    if different and (why or not longer):
        raise UsageError(
            f"{store.folder} holds a checkpoint of a run with other settings: "
            f"{'; '.join(different)}{why and f'; it cannot be gone on from, because {why}'}; bring "
            "its own ones back from a copy, or delete that folder to start again"
        )
    rows = facts.pop("rows", None)
    at = _position(facts)
    wanted = {"state": templates[at.phase]}
    if at.best_round is not None:
        wanted["best"] = templates[at.phase]
    if rows is None:
        found = store.restore(step, wanted)
        return at, found["state"], found.get("best")
    now = changed_rows.described(rows)
    changed_rows.check(store.rows, now)
    phase = experiment.phases[at.phase]
    rest, each = apart(phase.algorithm, templates[at.phase])
    wanted |= dict.fromkeys(wanted if now.best is not None else ("state",), rest)
    found = store.restore(step, wanted)
    clients, best = _clients(phase, now, each, store)
    state, best_state = found["state"]._replace(clients=clients), found.get("best")
    if best is not None and best_state is not None:
        best_state = best_state._replace(clients=best)
    if phase.store in ("device", "sharded"):
        return at, stores.arrays(state), best_state and stores.arrays(best_state)
    return at, state, best_state


def _clients(
    phase: Phase, now: changed_rows.Described, each: Sequence[PyTree], store: checkpoints.Store
) -> tuple[stores.Clients, stores.Snapshot | None]:
    """What a checkpoint holds of them, and of those of the best round."""
    kind = "disk" if phase.store == "disk" else "host"
    make = functools.partial(
        stores.Rows, clients=phase.federation.clients, store=kind, folder=store.folder.parent
    )
    several, offload = groups.has_groups(phase.algorithm), names(phase.algorithm)
    return changed_rows.read(store.rows, now, each, several, make, offload)


def _drop(sweep_runs: Sequence[SweepRun], after: int) -> None:
    """Remove checkpoints of later rounds, which are computed again."""
    for sweep_run in sweep_runs:
        for step in sweep_run.store.steps() if sweep_run.store else []:
            if step > after:
                sweep_run.store.drop(step)  # type: ignore[union-attr]
