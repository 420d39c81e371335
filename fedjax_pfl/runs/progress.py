"""Progress messages of a run: the values of the bar, and a line per evaluation for files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import numbers
from fedjax_pfl.report.numbers import format_bytes, format_score, metric_name, number
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.runs.run_state import SweepRun
from fedjax_pfl.simulation import forecast, summaries
from fedjax_pfl.simulation.forecast import Requirement
from fedjax_pfl.simulation.records import Evaluation

_MAX_CLIENTS = 8  # client ids in a line


def with_run_name(sweep_run: SweepRun, line: str) -> str:
    """Prefixes a message with the name of its run, if it has one."""
    return f"{sweep_run.name}: {line}" if sweep_run.name else line


def memory_line(needed: Requirement, store: str) -> str:
    """Returns a line with the bytes that a run needs and the place of its client state, `store`."""
    device, host, disk = map(forecast.format_bytes, needed)
    text = {
        "device": f"{device} (client state on the device)",
        "sharded": f"{device} on each device (client state spread over the devices)",
        "host": f"{device} on the device and {host} on the host (client state on the host)",
        "disk": f"{device} on the device, {host} on the host, {disk} on disk (client state there)",
    }
    return f"memory needed: at least {text[store]}"


def mean_score(metric: Metric, lines: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Formats the mean over runs of a metric's client mean; "" if none is finite.

    `lines` has the last line of metrics.jsonl of each run; `stage` is "before" or "after" (local
    training).
    """
    values = [numbers.mean_score(line, metric, stage) for line in lines]
    finite = [value for value in values if np.isfinite(value)]
    return format_score(metric, float(np.mean(finite))) if finite else ""


def evaluation_line(metric: Metric, lines: Sequence[Mapping[str, Any]], end: int) -> str:
    """Returns a line with the round, scores, loss, traffic and time of an evaluation.

    `lines` has the last line of metrics.jsonl of each run of a program; `end` is the
    number of rounds in all.
    """
    scores = [(stage, mean_score(metric, lines, stage)) for stage in ("before", "after")]
    score_text = ", ".join(f"{value} {stage}" for stage, value in scores if value)
    losses = [number((line["before"] or {}).get("loss")) for line in lines]
    traffic = sum(line["bytes_down"] + line["bytes_up"] for line in lines)
    parts = [
        f"{metric_name(metric)} {score_text or 'not finite'}",
        f"loss {np.mean(losses):.4f}" if np.isfinite(losses).all() else "",
        format_bytes(traffic),
        f"{sum(line['seconds'] for line in lines):.1f} s",
    ]
    runs = f" ({len(lines)} runs: mean scores, total bytes and time)" if len(lines) > 1 else ""
    return f"round {lines[0]['round']} of {end}{runs}: {', '.join(filter(None, parts))}"


def not_finite(experiment: Experiment, sweep_run: SweepRun, scores: Evaluation) -> Iterator[str]:
    """Yields a message about clients whose evaluation is not finite for the first time.

    The clients are added to the set `reported` of the run.
    """
    active = experiment.phases[sweep_run.at.phase].federation.active
    parts = [part for part in (scores.before, scores.validation, scores.after) if part is not None]
    ids = set[int]().union(
        *(summaries.not_finite(part, active, experiment.federation.task) for part in parts)
    )
    new = sorted(ids - sweep_run.reported)
    sweep_run.reported |= ids
    if new:
        names = ", ".join(map(str, new[:_MAX_CLIENTS]))
        more = f" and {len(new) - _MAX_CLIENTS} others" if len(new) > _MAX_CLIENTS else ""
        yield (
            f"round {sweep_run.at.round}: the evaluation of client{'s' * (len(new) > 1)} "
            f"{names}{more} is not finite; it is null, and means leave it out"
        )
