"""Recorded numbers and metrics, as text for figures, tables and sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_pfl.core.metrics import ACCURACY, METRICS, Metric
from fedjax_pfl.report.run_reader import Record
from fedjax_pfl.simulation import forecast


def format_bytes(n: float | None) -> str:
    """Returns a recorded number of bytes such as "1.23 MB"; None and NaN are "–"."""
    return "–" if n is None or not math.isfinite(n) else forecast.format_bytes(n)


def number(value: Any) -> float:
    """Returns a recorded value as a float, or NaN if it is missing or not finite."""
    missing = value is None or value == "" or not math.isfinite(float(value))
    return math.nan if missing else float(value)


def metric_of(metrics: Sequence[Record]) -> Metric:
    """Returns the first metric in a run's lines of metrics.jsonl; it selects the best round."""
    return metrics_of(metrics)[0]


def metrics_of(metrics: Sequence[Record]) -> list[Metric]:
    """Returns the metrics NAME with a key NAME_mean in lines of metrics.jsonl, or the accuracy."""
    scores: Record = next(filter(None, (line.get("before") for line in reversed(metrics))), {})
    names = [key.removesuffix("_mean") for key in scores if key.endswith("_mean")]
    custom: Record = next(filter(None, (line.get("custom_metrics") for line in metrics)), {})
    built_in = {name: metric for name, metric in METRICS.items() if name not in custom}
    metrics_by_name = [built_in.get(n) or _custom_metric(n, custom.get(n, {})) for n in names]
    return metrics_by_name or [ACCURACY]


def _custom_metric(name: str, properties: Record) -> Metric:
    """Returns a metric with the recorded `unit` and `higher_is_better`, to format scores only."""
    higher_is_better = bool(properties.get("higher_is_better", True))
    unit = str(properties.get("unit", ""))
    return ACCURACY._replace(name=name, unit=unit, higher_is_better=higher_is_better)


def mean_score(line: Record, metric: Metric, stage: str) -> float:
    """Returns the mean over clients in a line of metrics.jsonl, or NaN; `stage` as in the line."""
    return number((line.get(stage) or {}).get(f"{metric.name}_mean"))


def direction(metric: Metric) -> int:
    """Returns 1 if a higher score is better, else -1."""
    return 1 if metric.higher_is_better else -1


def metric_title(metric: Metric) -> str:
    """Returns the metric's name for the start of a sentence."""
    name = metric_name(metric)
    return name[:1].upper() + name[1:]


def metric_name(metric: Metric) -> str:
    """Returns the metric's name within a sentence."""
    return metric.name.replace("_", " ") if len(metric.name) > 4 else metric.name.upper()


def unit_suffix(metric: Metric) -> str:
    """Returns the unit of a metric as it follows its name, or ""."""
    return " in per cent" if metric.unit == "%" else ""


def format_score(metric: Metric, value: float) -> str:
    """Returns a score as text: "12.34 %" for 0.1234 if the unit is %, else a number; NaN: "–"."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:.2f} %" if metric.unit == "%" else f"{value:.4g}"


def format_score_without_percent(metric: Metric, value: float) -> str:
    """Like `format_score`, without the percent sign."""
    return format_score(metric, value).removesuffix(" %")


def format_p(p: float) -> str:
    """Returns the p-value of a test with four decimals, or with a power of ten if it is small."""
    return f"{p:.4f}" if p >= 1e-4 else f"{p:.1e}"


def format_mean_std(spread: Mapping[str, Any], metric: Metric) -> str:
    """Returns "mean ± std" without percent signs, or the mean alone if std is None.

    `spread` has keys "mean" and "std", as returned by `simulation.summaries.mean_std`.
    """
    mean, std = spread["mean"], spread["std"]
    text = format_score_without_percent(metric, mean)
    if std is None or math.isnan(mean):
        return text
    return f"{text} ± {format_score_without_percent(metric, std)}"


def privacy_parts(last: Mapping[str, Any]) -> list[str]:
    """Returns ε and δ in a line of metrics.jsonl as text, or [] for a run without privacy."""
    if "delta" not in last:
        return []
    epsilon = number(last["epsilon"])
    return ["no ε" if math.isnan(epsilon) else f"ε = {epsilon:.3g}", f"δ = {last['delta']:g}"]


def optional_parts(last: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Returns results that only some runs have, as text, from a line of metrics.jsonl.

    Each is (name in a table, title of a card, parts of the text).
    """
    simulated = last.get("simulated_seconds")
    times = [f"{number(simulated):,.1f} s simulated", f"{last.get('late') or 0:,} updates late"]
    parts = [
        ("rounds", "Simulated time", [] if simulated is None else times),
        ("epsilon", "Privacy", privacy_parts(last)),
    ]
    return [part for part in parts if part[2]]
