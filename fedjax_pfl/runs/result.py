"""Result of a run, its record and its report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl import data
from fedjax_pfl.core.algorithm import Federation, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import method_labels, run_reader
from fedjax_pfl.runs import reference_runs, run_directory
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.run_state import SweepRun, client_rows
from fedjax_pfl.simulation.ledger import Ledger


class Result(NamedTuple):
    """Result of a run that has finished or that a callback ended.

    It has the metrics and the last state, and the examples and functions.
    """

    config: dict[str, Any]  # resolved settings as nested plain data
    metrics: list[dict[str, Any]]  # one per evaluation, as in metrics.jsonl
    clients: list[dict[str, Any]]  # one per client, as in clients.csv
    confusion: Mapping[str, Any]  # as in confusion.json; empty if no matrices were counted
    ledger: Ledger  # bytes downloaded and uploaded, and counts by client
    round: int  # number of finished rounds
    phase: int  # index into `phases` of the phase of the last round
    state: State  # after `round` rounds
    best: State | None  # best state of this phase; None without validation examples
    phases: tuple[Phase, ...]  # parts of the run with one algorithm each, in order
    data: data.FederatedData  # examples of all clients
    federation: Federation  # facts about the clients
    directory: Path | None  # run directory, if one was written
    observations: run_directory.Observations  # arrays that the method exposes of its state
    resumed_at: int | None  # round at which the run was resumed; None if it was not

    def __repr__(self) -> str:
        """Returns one line with the last evaluation: states and examples are not printed."""
        last = self.metrics[-1] if self.metrics else {}
        scores = [
            f"{name.removesuffix('_mean')} {value:.3f} {stage} local training"
            for stage in ("before", "after")
            for name, value in (last.get(stage) or {}).items()
            if name.endswith("_mean") and value is not None
        ]
        directory = [] if self.directory is None else [str(self.directory)]
        methods = " then ".join(method_labels.methods(self.config))
        parts = [methods, f"{self.round} rounds", *scores, *directory]
        return f"Result({', '.join(parts)})"


def make_result(experiment: Experiment, sweep_run: SweepRun, state: State) -> Result:
    """Returns the result of a run; `experiment` has the phases of this run only."""
    return Result(
        config=sweep_run.config,
        metrics=list(sweep_run.at.metrics),
        clients=client_rows(experiment, sweep_run.at),
        confusion=sweep_run.at.confusion,
        ledger=sweep_run.at.ledger,
        round=sweep_run.at.round,
        phase=sweep_run.at.phase,
        state=state,
        best=sweep_run.best,
        phases=experiment.phases,
        data=experiment.data,
        federation=experiment.federation,
        directory=sweep_run.directory,
        observations=sweep_run.observations,
        resumed_at=sweep_run.resumed_at,
    )


def run_record(result: Result) -> run_reader.Run:
    """Returns the content of a run's directory, from which reports and comparisons are made.

    Raises UsageError if it has none.
    """
    if result.directory is None:
        raise UsageError("the run has no workdir, so it has no record; pass workdir to run")
    return run_reader.Run(
        directory=result.directory,
        config=result.config,
        metrics=result.metrics,
        clients=result.clients,
        confusion=result.confusion,
        traffic=run_directory.traffic(result.ledger),
        provenance=run_reader.read_provenance(result.directory),
        examples=run_reader.examples_of(result.directory, result.config),
    )


def write_report(result: Result) -> None:
    """Writes report.html, with its pictures, to the directory of a finished run.

    A run that a callback ended before its first evaluation has no report.
    """
    if not result.metrics:
        return
    # The import takes half a second, and only runs with a directory need it.
    from fedjax_pfl.report import method_figures, page
    from fedjax_pfl.report.partition_picture import draw_partition

    pictures = {"partition": draw_partition(result.data, result.federation)}
    pictures |= method_figures.draw(
        result.config, result.observations, list(result.ledger.down), result.metrics
    )
    record = run_record(result)
    page.write(record, pictures, reference_runs.named_runs(record))
