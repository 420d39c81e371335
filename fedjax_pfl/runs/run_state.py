"""Progress of a run, and the record of its evaluations.

One program computes one run or, in a sweep, several. Each run has its own directory.
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
from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report.loggers import Logger, from_setting
from fedjax_pfl.runs import checkpoints, run_directory
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.simulation import clients_csv, ledger, stores, summaries
from fedjax_pfl.simulation.ledger import Ledger
from fedjax_pfl.simulation.records import Evaluation


class Position(NamedTuple):
    """Progress of a run without its states. Plain data that every checkpoint contains."""

    phase: int = 0  # index of the current phase
    round: int = 0  # number of finished rounds
    seconds: float = 0.0  # training and evaluation: this run's share of its program's time
    evaluate_seconds: float = 0.0  # part of `seconds`
    compile_seconds: float = 0.0  # not part of `seconds`
    checkpoint_seconds: float = 0.0  # not part of `seconds`; without the current checkpoint
    simulated_seconds: float | None = None  # None if no time is simulated
    late: int = 0  # updates that missed the deadline
    ledger: Ledger = ledger.empty(0)  # bytes, dropped and rejected updates so far
    pending: Mapping[str, tuple[float, int]] = {}  # training metrics, as of `summaries.gather`
    metrics: tuple[dict[str, Any], ...] = ()  # lines of metrics.jsonl, one per evaluation
    clients: tuple[dict[str, Any], ...] = ()  # scores of each client at the last evaluation
    confusion: Mapping[str, Any] = {}  # confusion matrices of the last evaluation
    best_round: int | None = None  # of this phase, by validation
    best_score: float | None = None  # mean validation score of that round


@dataclasses.dataclass
class SweepRun:
    """One of the runs that a program computes.

    `observations` are arrays of its method. `files` has, by round of a checkpoint, the names of its
    files of off-device rows.
    """

    name: str  # unique in the sweep; empty for a single run
    settings: ConfigDict  # all settings
    config: dict[str, Any]  # resolved settings as they are saved
    directory: Path | None = None  # None if nothing is written
    store: checkpoints.Store | None = None  # its checkpoints, if it has a directory
    at: Position = dataclasses.field(default_factory=Position)  # progress
    best: State | None = None  # at the best round of this phase
    observations: run_directory.Observations = dataclasses.field(default_factory=dict)
    resumed_at: int | None = None  # round at which it was resumed
    last_checkpoint_seconds: float = 0.0  # estimates the time of the next checkpoint
    files: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    reported: set[int] = dataclasses.field(default_factory=set)  # clients reported as not finite
    loggers: list[Logger] = dataclasses.field(default_factory=list)  # of `log_to`

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that turns a failure to write to the directory into a UsageError."""
        return run_directory.writing(self.directory, self.store and self.store.steps)

    def close_loggers(self) -> None:
        """Closes the logs of `log_to`."""
        for logger in self.loggers:
            logger.close()


def sync_files(sweep_run: SweepRun) -> None:
    """Removes later rounds than the current one from metrics.jsonl and the logs of `log_to`.

    Also reads the observations.
    """
    if sweep_run.directory:
        with sweep_run.writing():
            run_directory.write_metrics(sweep_run.directory, list(sweep_run.at.metrics))
            sweep_run.close_loggers()
            log_to = sweep_run.settings.log_to
            sweep_run.loggers = from_setting(log_to, sweep_run.directory)
            for logger in sweep_run.loggers if sweep_run.at.metrics else ():
                logger(sweep_run.at.metrics[-1])
            sweep_run.observations = run_directory.read_observations(
                sweep_run.directory, sweep_run.at.round
            )


def append_evaluation(
    sweep_run: SweepRun, observed: Mapping[str, np.ndarray], line: dict[str, Any]
) -> None:
    """Appends an evaluation to the run's observations and files.

    `observed` has the arrays that the method exposes of its state; `line` is for metrics.jsonl.
    Arrays that another method of an earlier phase exposed under the same name are removed.
    """
    methods = _methods_by_round(sweep_run)
    for name, array in observed.items():
        if array.dtype.kind == "V":  # bfloat16, which no .npz file can hold
            array = array.astype(np.float32)
        earlier = zip(*sweep_run.observations.get(name, ([], [])), strict=True)
        comparable = [
            (r, saved)
            for r, saved in earlier
            if methods.get(r) == methods.get(line["round"]) and saved.shape == array.shape
        ]
        rounds, arrays = [r for r, _ in comparable], [saved for _, saved in comparable]
        sweep_run.observations[name] = [*rounds, line["round"]], [*arrays, array]
    if sweep_run.directory:
        with sweep_run.writing():
            run_directory.append_metrics(sweep_run.directory, line)
            for logger in sweep_run.loggers:
                logger(line)
            run_directory.write_observations(sweep_run.directory, sweep_run.observations)


def _methods_by_round(sweep_run: SweepRun) -> dict[int, str]:
    """Returns the name of the method at each evaluation, by round."""
    config = sweep_run.config
    names = [phase.get("algorithm", config["algorithm"]) for phase in config["phases"] or [{}]]
    return {line["round"]: names[line["phase"]] for line in sweep_run.at.metrics}


def record_evaluation(
    experiment: Experiment,
    sweep_run: SweepRun,
    scores: Evaluation,
    state: State,
    observed: Mapping[str, np.ndarray],
    triggered: Evaluation | None = None,
    *,
    may_be_best: bool = True,
) -> dict[str, Any]:
    """Sets `at` and, if the validation score is the phase's best so far, `best` of the run.

    `scores` and `state` are those of the evaluation; `observed` are arrays that the method exposes
    of the state. `triggered` are scores on test examples with the trigger of a backdoor. With
    `may_be_best` False the round is not the best, whatever its score. Returns the line for
    metrics.jsonl, which is not written yet.
    """
    at, task = sweep_run.at, experiment.federation.task
    inputs = experiment.phases[at.phase].inputs
    honest = experiment.phases[at.phase].federation.active & ~inputs.is_attacker
    before = summaries.summary(scores.before, honest, task)
    validation = summaries.summary(scores.validation, honest, task)
    is_best = may_be_best and _is_best(task.metrics[0], validation, at.best_score)
    if is_best and validation:
        score = validation[f"{task.metrics[0].name}_mean"]
        at = at._replace(best_round=at.round, best_score=score)
        sweep_run.best = stores.copy_state(state)
    line = {
        "round": at.round,
        "phase": at.phase,
        "seconds": round(at.seconds, 3),
        "evaluate_seconds": round(at.evaluate_seconds, 3),
        "compile_seconds": round(at.compile_seconds, 3),
        "checkpoint_seconds": round(at.checkpoint_seconds, 3),
        **summaries.means(at.pending),
        "before": before,
        "after": scores.after and summaries.summary(scores.after, honest, task),
        "validation": validation,
        "bytes_down": at.ledger.total_down,
        "bytes_up": at.ledger.total_up,
        "dropped": sum(at.ledger.dropped),
        "rejected": sum(at.ledger.rejected),
        **_simulated(at),
        "best_round": at.best_round,
        **dict(item for s in experiment.statements for item in s.metrics(at.round).items()),
        **summaries.attack_summary(inputs.is_attacker, triggered, honest, task),
        **summaries.user_metrics(task),
        **_diagnostics(experiment, sweep_run, observed),
    }
    columns = summaries.attack_columns(inputs.is_attacker, triggered, task)
    columns |= {
        name.removeprefix(clients_csv.OBSERVED): np.asarray(array)
        for name, array in observed.items()
        if name.startswith(clients_csv.OBSERVED) and np.shape(array) == honest.shape
    }
    rows = clients_csv.client_scores(scores, task, inputs.evaluated, columns)
    previous = at.clients if at.best_round is not None else ()  # none of an earlier phase
    rows = clients_csv.add_best(rows, previous, is_best, task)
    sweep_run.at = at._replace(
        metrics=(*at.metrics, line),
        clients=rows,
        confusion=summaries.confusion(scores, honest),
        pending={},
    )
    return line


def _simulated(at: Position) -> dict[str, Any]:
    """Returns the simulated seconds and the number of late updates; {} without simulated time."""
    if at.simulated_seconds is None:
        return {}
    return {"simulated_seconds": round(at.simulated_seconds, 6), "late": at.late}


def _diagnostics(
    experiment: Experiment, sweep_run: SweepRun, current: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Returns the fields of `diagnostics.Reading` for observations `current`; {} without any."""
    at, phase = sweep_run.at, experiment.phases[sweep_run.at.phase]
    method = METHODS.get(phase.config.algorithm)
    if method is None or not method.diagnostics:
        return {}
    earlier = [line for line in at.metrics if line["phase"] == at.phase]
    first_round, last_round = (earlier[i]["round"] if earlier else None for i in (0, -1))
    observations = sweep_run.observations.items()
    before = {
        name: arrays[-1] for name, (rounds, arrays) in observations if rounds[-1] == last_round
    }
    first = {
        name: arrays[rounds.index(first_round)]
        for name, (rounds, arrays) in observations
        if first_round in rounds
    }
    observed = diagnostics.Observed(
        now=current, before=before, layers=list(at.ledger.down), first=first
    )
    length = phase.end - phase.begin
    return diagnostics.read(method.diagnostics, observed, earlier, at.round, length)._asdict()


def new_warnings(sweep_run: SweepRun) -> list[str]:
    """Returns the `remarks` in the last line of metrics.jsonl that are not in the line before."""
    *previous, last = [line.get("remarks", []) for line in sweep_run.at.metrics[-2:]]
    return [remark for remark in last if not previous or remark not in previous[0]]


def client_rows(experiment: Experiment, at: Position) -> list[dict[str, Any]]:
    """Returns the rows of clients.csv at the end of a run: scores and bytes of each client.

    The scores are those of the last evaluation, which may be in an earlier phase than the end.
    """
    phase = at.metrics[-1]["phase"] if at.metrics else -1
    evaluated = experiment.phases[phase].inputs.evaluated
    return clients_csv.client_rows(experiment.federation, at.clients, at.ledger, evaluated)


def _is_best(
    metric: Metric, validation: Mapping[str, Any] | None, best_score: float | None
) -> bool:
    """Returns True if the mean validation score is better than `best_score`.

    `validation` is `summaries.summary` of an evaluation; test examples are never used. Returns
    False if a client's loss is not finite. `best_score` is None before the first.
    """
    score = None if validation is None else validation[f"{metric.name}_mean"]
    if validation is None or score is None or validation["not_finite"]:
        return False
    if best_score is None:
        return True
    return score > best_score if metric.higher_is_better else score < best_score


def reset(experiment: Experiment, sweep_run: SweepRun) -> None:
    """Sets `at`, `best` and `resumed_at` of a run to those before the first round."""
    sweep_run.at = Position(ledger=ledger.empty(experiment.federation.clients))
    sweep_run.best = sweep_run.resumed_at = None
