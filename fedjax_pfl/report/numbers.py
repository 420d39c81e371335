"""Recorded numbers and metrics, as they are said in figures, tables and sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_pfl.core.scores import ACCURACY, METRICS, Metric
from fedjax_pfl.report.run_reader import Record


def human_bytes(n: float | None) -> str:
    """A number of bytes to three digits in decimal units: 1 kB is 1,000 bytes."""
    if n is None or not math.isfinite(n):
        return "–"
    value = float(n)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3f}".rstrip("0").rstrip(".") + " PB"


def number(value: Any) -> float:
    """A recorded value as a float: NaN where it is missing or was not finite."""
    missing = value is None or value == "" or not math.isfinite(float(value))
    return math.nan if missing else float(value)


def metric_of(metrics: Sequence[Record]) -> Metric:
    """The first metric of a run, by which its best round is chosen: the first key of its scores."""
    return metrics_of(metrics)[0]


def metrics_of(metrics: Sequence[Record]) -> list[Metric]:
    """All metrics of a run, from the keys that end in `_mean`."""
    scores: Record = next(filter(None, (line.get("before") for line in reversed(metrics))), {})
    names = [key.removesuffix("_mean") for key in scores if key.endswith("_mean")]
    own: Record = next(filter(None, (line.get("own_metrics") for line in metrics)), {})
    return [METRICS.get(name) or _own(name, own.get(name, {})) for name in names] or [ACCURACY]


def _own(name: str, said: Record) -> Metric:
    """What a run says of a metric of a task that is not ours."""
    higher, unit = bool(said.get("higher_is_better", True)), str(said.get("unit", ""))
    return ACCURACY._replace(name=name, unit=unit, higher_is_better=higher)


def word(metric: Metric) -> str:
    """What it is called at the start of a sentence."""
    return spoken(metric).capitalize() if len(metric.name) > 4 else metric.name.upper()


def spoken(metric: Metric) -> str:
    """What it is called within a sentence."""
    return metric.name.replace("_", " ") if len(metric.name) > 4 else metric.name.upper()


def in_unit(metric: Metric) -> str:
    """After its name, what its numbers are in."""
    return " in per cent" if metric.unit == "%" else ""


def show_score(metric: Metric, value: float) -> str:
    """A share as a percentage, any other score as a number."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:.2f} %" if metric.unit == "%" else f"{value:.4g}"


def without_sign(metric: Metric, value: float) -> str:
    """As `show_score`, where the sign of per cent stands elsewhere."""
    return show_score(metric, value).removesuffix(" %")


def mean_and_deviation(spread: Mapping[str, Any], metric: Metric) -> str:
    """A mean ± its deviation, where there is one; both without the sign of per cent."""
    mean, std = spread["mean"], spread["std"]
    shown = without_sign(metric, mean)
    return shown if std is None or math.isnan(mean) else f"{shown} ± {without_sign(metric, std)}"
