"""The result of a run, its record and its report."""

from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl import data
from fedjax_pfl.core.algorithm import Federation, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.runs import beside, run_directory
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.simulation.ledger import Ledger


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
    observations: run_directory.Observations  # what the algorithm shows of its state
    resumed_at: int | None  # the round that a resumed run went on from

    def __repr__(self) -> str:
        """Returns one line with the last evaluation: states and examples are not printed."""
        last = self.metrics[-1] if self.metrics else {}
        scores = [
            f"{name.removesuffix('_mean')} {value:.3f} {when} local training"
            for when in ("before", "after")
            for name, value in (last.get(when) or {}).items()
            if name.endswith("_mean") and value is not None
        ]
        place = [] if self.directory is None else [str(self.directory)]
        parts = [self.config["algorithm"], f"{last.get('round', 0)} rounds", *scores, *place]
        return f"Result({', '.join(parts)})"


def recorded(result: Result) -> run_reader.Run:
    """A run's record, as its report and a comparison take it."""
    if result.directory is None:
        raise UsageError("the run was given no workdir, and has no record to show")
    traffic = run_directory.traffic(result.ledger)
    made = run_reader.read_made(result.directory)
    return run_reader.Run(
        result.directory,
        result.config,
        result.metrics,
        result.clients,
        traffic,
        made,
        examples=run_reader.examples_of(result.directory, result.config),
    )


def write_report(result: Result) -> None:
    """The page and the pictures of a run that has ended."""
    # What draws takes half a second to import, and only a run with a directory comes here.
    from fedjax_pfl.report import method_figures, page
    from fedjax_pfl.report.partition_picture import draw_partition

    pictures = {"partition": draw_partition(result.data, result.federation)}
    pictures |= method_figures.draw(
        result.config, result.observations, list(result.ledger.down), result.metrics
    )
    page.write(recorded(result), pictures, beside.given(recorded(result)))
