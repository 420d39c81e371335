"""A run's progress, and what an evaluation adds to it.

A program computes one run or, in a sweep, several. Each run has a directory of its own.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core import diagnostics
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report import tensorboard
from fedjax_pfl.runs import checkpoints, run_directory
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.simulation import ledger, metrics, stores
from fedjax_pfl.simulation.ledger import Ledger
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


def sync_files(sweep_run: SweepRun) -> None:
    """Let its files say what has been measured up to where it stands, and read what was seen."""
    if sweep_run.directory:
        with sweep_run.writing():
            run_directory.write_metrics(sweep_run.directory, list(sweep_run.at.metrics))
            if sweep_run.settings.tensorboard:
                tensorboard.write(sweep_run.directory, sweep_run.at.metrics)
            sweep_run.seen = run_directory.read_observations(
                sweep_run.directory, sweep_run.at.round
            )


def append_evaluation(
    sweep_run: SweepRun, observed: Mapping[str, np.ndarray], line: dict[str, Any]
) -> None:
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


def record_evaluation(
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
    better = _is_better(experiment.federation.task.metrics[0], before, validation, at.best_score)
    if better and validation:
        score = validation[f"{experiment.federation.task.metrics[0].name}_mean"]
        at = at._replace(best_round=at.round, best_score=score)
        sweep_run.best = stores.copy_state(state)
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
        **metrics.user_metrics(experiment.federation.task),
        **_diagnostics(experiment, sweep_run, shown),
    }
    evaluated = experiment.phases[at.phase].inputs.evaluated
    rows = metrics.client_scores(scores, experiment.federation.task, evaluated)
    known = at.clients if at.best_round is not None else ()  # an earlier phase's are not this one's
    rows = metrics.add_best(rows, known, better, experiment.federation.task)
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


def new_warnings(sweep_run: SweepRun) -> list[str]:
    """What the last evaluation remarks and the one before did not."""
    said = [line.get("remarks", []) for line in sweep_run.at.metrics[-2:]]
    before = said[0] if len(said) > 1 else []
    return [remark for remark in said[-1] if remark not in before]


def client_table(experiment: Experiment, at: Position) -> list[dict[str, Any]]:
    """A row for each client, at the end of a run."""
    last = experiment.phases[-1].inputs.evaluated
    return metrics.client_table(experiment.federation, at.clients, at.ledger, last)


def _is_better(
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


def reset(experiment: Experiment, sweep_run: SweepRun) -> None:
    """Set it to before the first round."""
    sweep_run.at = Position(ledger=ledger.empty(experiment.federation.clients))
    sweep_run.best = sweep_run.resumed_at = None
