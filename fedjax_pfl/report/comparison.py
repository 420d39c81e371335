"""Several runs side by side: which of them are one row, means over seeds, and paired tests."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from fedjax_pfl.core import diagnostics
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import method_labels, run_reader
from fedjax_pfl.report.figures import Curve
from fedjax_pfl.report.html_page import flat
from fedjax_pfl.report.numbers import metric_of, number
from fedjax_pfl.report.run_reader import Record, Run
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with
from fedjax_pfl.simulation.metrics import mean_std


class Row(NamedTuple):
    """Runs that differ in their seed only."""

    label: str
    config: Mapping[str, Any]  # what they have in common, with defaults where they are silent
    runs: Sequence[Run]  # by seed


class Summary(NamedTuple):
    """A row's numbers at the last evaluation; scores as `mean_std` gives them."""

    before: Mapping[str, Any]
    after: Mapping[str, Any] | None  # None where local training was not evaluated
    worst10: Mapping[str, Any]  # before local training
    megabytes_down: float  # of all clients, mean over seeds
    megabytes_up: float
    rounds: tuple[int, int]  # fewest and most


class Paired(NamedTuple):
    """A row against another, client by client, each with its mean over seeds."""

    difference: float  # mean, this row less the other
    p: float  # two-sided Wilcoxon signed-rank test; 1 where nothing differs
    pairs: int  # clients


def read(directory: Path) -> Run:
    """One run directory, or UsageError where it is none or has nothing to compare yet."""
    return check(run_reader.read(directory))


def check(run: Run) -> Run:
    """The same run, or UsageError where it has nothing to compare."""
    if not run.metrics[-1].get("before"):
        raise UsageError(f"{run.directory} has nothing to compare: no evaluation on test examples")
    return run


def group(runs: Sequence[Run]) -> list[Row]:
    """Runs as rows, in the order in which the rows first appear; the same run twice is an error."""
    names = {metric_of(run.metrics).name: run.directory for run in reversed(runs)}
    if len(names) > 1:
        (one, here), (other, there) = list(names.items())[:2]
        raise UsageError(
            f"{there} is scored by {other} and {here} by {one}; compare runs with one score"
        )
    known = run_reader.known_settings()
    configs: dict[str, dict[str, Any]] = {}
    members: dict[str, dict[int, Run]] = {}
    for run in runs:
        shared = common(run.config, known)
        if run.examples != "":
            shared["examples"] = run.examples or f"unknown in {run.directory}"
        key = json.dumps(shared, sort_keys=True)
        configs[key] = shared
        seeds = members.setdefault(key, {})
        if run.seed in seeds:
            raise UsageError(
                f"{seeds[run.seed].directory} and {run.directory} have the same settings and seed "
                f"{run.seed}; give one of them"
            )
        seeds[run.seed] = run
    return [
        Row(label, configs[key], [members[key][seed] for seed in sorted(members[key])])
        for label, key in zip(labels(list(configs.values())), configs, strict=True)
    ]


def common(config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its seed and without settings that change no result.

    A setting that the library did not have when the run was made is at its default.

    known: all settings; of its sub-configs only those that the configuration has are taken.
    """
    plain = {key: value for key, value in known.items() if not isinstance(value, Mapping)}
    whole = {
        key: {**known[key], **value} if isinstance(known.get(key), Mapping) else value
        for key, value in {**plain, **config}.items()
    }
    return {k: v for k, v in whole.items() if k not in {*settings_with("resumable"), "seed"}}


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each configuration, the settings in which those that have them differ."""
    each = [dict(flat(config)) for config in configs]
    seen: dict[str, set[str]] = {}
    for one in each:
        for key, value in one.items():
            seen.setdefault(key, set()).add(value)
    differ = [key for key in seen if len(seen[key]) > 1]
    kinds = [key for key in configuration.Registry._fields if key in differ]
    others = sorted(set(differ) - set(kinds), key=lambda key: ("." in key, key))

    def label(one: Mapping[str, str], others: Sequence[str]) -> str:
        words = [_named(key, one[key]) for key in kinds if key in one]
        words += [f"{key}={one[key]}" for key in others if key in one]
        return ", ".join(words) or method_labels.row(one.get("algorithm", "?"))

    made = [label(one, others) for one in each]
    if len(set(made)) < len(made):  # a setting that only some of them have, as of another version
        partial = [key for key in seen if not all(key in one for one in each)]
        made = [label(one, [*others, *sorted(set(partial) - set(others))]) for one in each]
    return made


def _named(kind: str, word: str) -> str:
    return method_labels.row(word) if kind == "algorithm" else word


def is_variant(row: Row) -> bool:
    """Returns True if a row's method is a variant of this library."""
    return method_labels.is_variant(str(row.config.get("algorithm")))


def unfinished(row: Row) -> str:
    """Which runs of a row have not ended, and how far they are; nothing where all have."""
    found = [run for run in row.runs if not run.finished]
    said = [(f"seed {run.seed} ", f"unfinished, round {run.metrics[-1]['round']}") for run in found]
    return ", ".join(seed + how_far if len(row.runs) > 1 else how_far for seed, how_far in said)


def summary(row: Row) -> Summary:
    """Means over the seeds of a row, of the last evaluation of each."""
    lasts = [run.metrics[-1] for run in row.runs]
    name = metric_of(lasts).name

    def over(stage: str, key: str) -> dict[str, Any]:
        return mean_std([number(last[stage].get(f"{name}_{key}")) for last in lasts])

    def megabytes(key: str) -> float:
        return float(np.mean([number(last.get(key)) for last in lasts])) / 1e6

    rounds = [last["round"] for last in lasts]
    return Summary(
        over("before", "mean"),
        over("after", "mean") if all(last.get("after") for last in lasts) else None,
        over("before", "worst10"),
        megabytes("bytes_down"),
        megabytes("bytes_up"),
        (min(rounds), max(rounds)),
    )


def diagnostic_values(row: Row) -> dict[str, float]:
    """Diagnostics of the last evaluations, each as one number: means over layers and seeds."""
    lasts = [run.metrics[-1].get("observed", {}) for run in row.runs]
    names = [name for name in lasts[0] if all(name in last for last in lasts)]
    each = {name: [diagnostics.mean(last[name]) for last in lasts] for name in names}
    return {name: float(np.mean(values)) for name, values in each.items()}


def curve(row: Row) -> Curve:
    """Score before local training and bytes at the rounds that all seeds have: means over seeds."""
    by_round = [{line["round"]: line for line in run.metrics} for run in row.runs]
    rounds = sorted(set.intersection(*(set(lines) for lines in by_round)))
    name = metric_of(row.runs[0].metrics).name

    def over(value: Callable[[Record], float]) -> list[float]:
        return [float(np.mean([value(lines[r]) for lines in by_round])) for r in rounds]

    return Curve(
        rounds,
        over(lambda line: number(line.get("bytes_down")) + number(line.get("bytes_up"))),
        over(lambda line: number((line["before"] or {}).get(f"{name}_mean"))),
    )


def paired(row: Row, first: Row, stage: str) -> Paired | str:
    """Row against first, client by client, or why they cannot be paired.

    A client's scores under several seeds come from the same examples and are no independent
    samples, so that a pair is a client with the mean of its differences over the seeds. Paired are
    the clients over which a run's mean is taken, so that the mean difference is the difference of
    the rows' means.
    """
    difference = _differences(row, first, stage)
    if isinstance(difference, str):
        return difference
    p = float(wilcoxon(difference).pvalue) if difference.any() else 1.0
    return Paired(float(difference.mean()), p, len(difference))


def better_clients(row: Row, first: Row, stage: str) -> int:
    """For how many of the clients that are paired the row is better than the first."""
    difference = _differences(row, first, stage)
    return 0 if isinstance(difference, str) else _number_better(row, difference)


def _number_better(row: Row, difference: np.ndarray) -> int:
    higher = metric_of(row.runs[0].metrics).higher_is_better
    return int(np.sum(difference > 0 if higher else difference < 0))


def extremes(
    row: Row, first: Row, stage: str
) -> tuple[tuple[str, float], tuple[str, float]] | None:
    """The client that gains most and the one that loses most against the first, by their names.

    Nothing where clients are nobody, or cannot be paired.
    """
    difference = _differences(row, first, stage)
    names = {client["client"]: client.get("owner") for client in row.runs[0].clients}
    if isinstance(difference, str) or not any(names.values()):
        return None
    higher = metric_of(row.runs[0].metrics).higher_is_better
    each = list(zip(_paired_clients(row, stage), difference.tolist(), strict=True))
    in_order = sorted(each, key=lambda one: one[1] if higher else -one[1])
    worst, best = ((str(names[client]), value) for client, value in (in_order[0], in_order[-1]))
    return best, worst


def _paired_clients(row: Row, stage: str) -> list[int]:
    """In the order of `_differences`."""
    return list(dict.fromkeys(client for _, client, _ in _scores(row, stage)))


def better_than_alone(row: Row, rows: Sequence[Row]) -> float | None:
    """The share of clients whom the method serves better than a run of Local on the same examples.

    None where there is no such run among the rows, or the row is it.
    """
    for other in rows:
        alone = other.config.get("algorithm") == "local" and not other.config.get("phases")
        if alone and other is not row:
            pairs = _differences(row, other, "before")
            if not isinstance(pairs, str):
                return _number_better(row, pairs) / len(pairs)
    return None


def _differences(row: Row, first: Row, stage: str) -> np.ndarray | str:
    """Of each client, its mean over seeds; or why there are none."""
    if unfinished(row) or unfinished(first):
        return "unfinished"
    if [run.seed for run in row.runs] != [run.seed for run in first.runs]:
        return "other seeds"
    if problem(row.config) != problem(first.config):
        return "other clients"
    if len(examples := {run.examples for run in (*row.runs, *first.runs)}) > 1:
        return "other examples"
    if None in examples and row is not first:
        return "examples unknown"
    ours, theirs = _scores(row, stage), _scores(first, stage)
    if ours.keys() != theirs.keys() or not ours:
        return "other clients"
    places: dict[tuple[int, int], int] = {}  # of a client
    place = [places.setdefault(key[1:], len(places)) for key in ours]
    if np.any(np.bincount(place) != len(row.runs)):
        return "other clients"
    gaps = np.array([ours[key] - theirs[key] for key in ours])
    difference = np.bincount(place, gaps) / len(row.runs)
    if np.isnan(difference).any():
        return "scores missing"
    # To twelve digits of the scores: 0.9 - 0.8 and 0.3 - 0.2 are a tie, which binary fractions
    # would break.
    largest = np.nanmax(np.abs([*ours.values(), *theirs.values()]))
    return np.round(difference, 12 - int(np.ceil(np.log10(largest))) if largest > 0 else 12)


def problem(config: Mapping[str, Any]) -> list[Any]:
    """What says which examples each client has."""
    own = [config.get(str(config.get(kind)).partition(":")[0]) for kind in ("dataset", "partition")]
    return [*(config.get(key) for key in settings_with("defines_data")), *own]


def _scores(row: Row, stage: str) -> dict[tuple[int, int, int], float]:
    """By seed, client and its number of test examples."""
    name = metric_of(row.runs[0].metrics).name
    last = (row.config.get("phases") or [{}])[-1]
    wanted = last.get("participants", row.config.get("participants")) != "held_out"
    return {
        (run.seed, client["client"], client["test_examples"]): number(client.get(f"{stage}_{name}"))
        for run in row.runs
        for client in run.clients
        if bool(client.get("active")) is wanted and (client.get("test_examples") or 0) > 0
    }
