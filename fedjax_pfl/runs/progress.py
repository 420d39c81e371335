"""What is told while a run goes on: a bar on a terminal, and a line per evaluation elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report.numbers import human_bytes, number, show_score, spoken
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.runs.run_state import SweepRun
from fedjax_pfl.simulation import metrics
from fedjax_pfl.simulation.records import Evaluation

_NAMED = 8  # clients in a line


def named(sweep_run: SweepRun, line: str) -> str:
    """A line for people, which says of which run it is where there are several."""
    return f"{sweep_run.name}: {line}" if sweep_run.name else line


def score(metric: Metric, lines: Sequence[Mapping[str, Any]], stage: str) -> str:
    """The mean over runs that are computed together; nothing where none was scored."""
    found = [number((line[stage] or {}).get(f"{metric.name}_mean")) for line in lines]
    kept = [value for value in found if np.isfinite(value)]
    return show_score(metric, float(np.mean(kept))) if kept else ""


def evaluation(metric: Metric, lines: Sequence[Mapping[str, Any]], end: int) -> str:
    """One line for a file: where the run is, how good, and what it has cost.

    Args:
      lines: that of each run that is computed in this program.
      end: the last round.
    """
    last = lines[0]
    scores = [(stage, score(metric, lines, stage)) for stage in ("before", "after")]
    said = [f"{value} {stage}" for stage, value in scores if value]
    losses = [number((line["before"] or {}).get("loss")) for line in lines]
    moved = sum(line["bytes_down"] + line["bytes_up"] for line in lines)
    parts = [
        f"{spoken(metric)} {', '.join(said)}" if said else f"{spoken(metric)} not finite",
        f"loss {np.mean(losses):.4f}" if np.isfinite(losses).all() else "",
        human_bytes(moved),
        f"{sum(line['seconds'] for line in lines):.1f} s",
    ]
    several = f" ({len(lines)} runs, mean)" if len(lines) > 1 else ""
    return f"round {last['round']} of {end}{several}: {', '.join(filter(None, parts))}"


def not_finite(experiment: Experiment, sweep_run: SweepRun, scores: Evaluation) -> Iterator[str]:
    """A line on clients whose evaluation is not finite for the first time in this run."""
    active = experiment.phases[sweep_run.at.phase].federation.active
    parts = [part for part in (scores.before, scores.validation, scores.after) if part is not None]
    found = set[int]().union(
        *(metrics.not_finite(part, active, experiment.federation.task) for part in parts)
    )
    first = sorted(found - sweep_run.named)
    sweep_run.named |= found
    if first:
        names = ", ".join(map(str, first[:_NAMED]))
        more = f" and {len(first) - _NAMED} others" if len(first) > _NAMED else ""
        yield (
            f"round {sweep_run.at.round}: the evaluation of client{'s' * (len(first) > 1)} "
            f"{names}{more} is not finite; it is null, and means leave it out"
        )
