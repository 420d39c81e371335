"""Several runs side by side: which of them are one row, means over seeds, and paired tests."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from fedjax_pfl.config import configuration
from fedjax_pfl.config.settings import having
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine import vital_signs
from fedjax_pfl.engine.metrics import mean_std
from fedjax_pfl.report.figures import Curve, Record, number, score_name
from fedjax_pfl.report.page import flat


class Run(NamedTuple):
    """What a run directory holds, finished or not."""

    directory: Path
    config: Mapping[str, Any]
    metrics: Sequence[Record]
    clients: Sequence[Mapping[str, str]]  # none before the end
    finished: bool

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))


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
    """A row against another, client by client and seed by seed."""

    difference: float  # mean, this row less the other
    p: float  # two-sided Wilcoxon signed-rank test; 1 where nothing differs
    pairs: int


def read(directory: Path) -> Run:
    """One run directory, or UsageError where it is none or has nothing to show yet."""
    missing = [n for n in ("config.json", "metrics.jsonl") if not (directory / n).is_file()]
    if missing:
        raise UsageError(f"{directory} is not a run directory: it lacks {' and '.join(missing)}")
    finished = (directory / "report.html").is_file()
    lines = [x for x in (directory / "metrics.jsonl").read_text().split("\n") if x.strip()]
    try:
        config = dict(json.loads((directory / "config.json").read_text()))
        metrics = [json.loads(line) for line in lines[:-1]]
    except (TypeError, ValueError):
        raise UsageError(f"{directory} is damaged: its files are not JSON") from None
    try:
        metrics += [json.loads(line) for line in lines[-1:]]
    except ValueError:
        if finished:
            raise UsageError(f"{directory} is damaged: metrics.jsonl is not JSON") from None
        # A run that is going on may be half-way through its last line.
    if not metrics or not metrics[-1].get("before"):
        raise UsageError(f"{directory} has nothing to compare: no evaluation on test examples")
    clients = []
    if finished and (directory / "clients.csv").is_file():
        with (directory / "clients.csv").open(newline="") as file:
            clients = list(csv.DictReader(file))
    return Run(directory, config, metrics, clients, finished)


def group(runs: Sequence[Run]) -> list[Row]:
    """Runs as rows, in the order in which the rows first appear; the same run twice is an error."""
    names = {score_name(run.metrics): run.directory for run in reversed(runs)}
    if len(names) > 1:
        (one, here), (other, there) = list(names.items())[:2]
        raise UsageError(
            f"{there} is scored by {other} and {here} by {one}; compare runs with one score"
        )
    known = known_settings()
    configs: dict[str, dict[str, Any]] = {}
    members: dict[str, dict[int, Run]] = {}
    for run in runs:
        shared = common(run.config, known)
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


def known_settings() -> dict[str, Any]:
    """All settings at their defaults, as a run directory would have them."""
    return json.loads(json.dumps(configuration.default().to_dict()))


def common(config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the seed and what is neutral; a setting of later is at its default.

    known: all settings; of its sub-configs only those that the configuration has are taken.
    """
    plain = {key: value for key, value in known.items() if not isinstance(value, Mapping)}
    whole = {
        key: {**known[key], **value} if isinstance(known.get(key), Mapping) else value
        for key, value in {**plain, **config}.items()
    }
    return {k: v for k, v in whole.items() if k not in {*having("resumable"), "seed"}}


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each configuration, the settings in which those that have them differ."""
    each = [dict(flat(config)) for config in configs]
    seen: dict[str, set[str]] = {}
    for one in each:
        for key, value in one.items():
            seen.setdefault(key, set()).add(value)
    differ = [key for key in seen if len(seen[key]) > 1]
    kinds = [key for key in configuration.Words._fields if key in differ]
    others = sorted(set(differ) - set(kinds), key=lambda key: ("." in key, key))
    return [
        ", ".join(
            [one[key] for key in kinds if key in one]
            + [f"{key}={one[key]}" for key in others if key in one]
        )
        or one.get("algorithm", "?")
        for one in each
    ]


def unfinished(row: Row) -> str:
    """Which runs of a row have not ended, and how far they are; nothing where all have."""
    found = [run for run in row.runs if not run.finished]
    which = lambda run: f"seed {run.seed} " if len(row.runs) > 1 else ""
    return ", ".join(f"{which(run)}unfinished, round {run.metrics[-1]['round']}" for run in found)


def summary(row: Row) -> Summary:
    """Means over the seeds of a row, of the last evaluation of each."""
    lasts = [run.metrics[-1] for run in row.runs]
    name = score_name(lasts)
    over = lambda stage, key: mean_std([number(last[stage].get(f"{name}_{key}")) for last in lasts])
    megabytes = lambda key: float(np.mean([number(last.get(key)) for last in lasts])) / 1e6
    rounds = [last["round"] for last in lasts]
    return Summary(
        over("before", "mean"),
        over("after", "mean") if all(last.get("after") for last in lasts) else None,
        over("before", "worst10"),
        megabytes("bytes_down"),
        megabytes("bytes_up"),
        (min(rounds), max(rounds)),
    )


def vital(row: Row) -> dict[str, float]:
    """Vital signs of the last evaluations, each as one number: means over layers and seeds."""
    lasts = [run.metrics[-1].get("observed", {}) for run in row.runs]
    names = [name for name in lasts[0] if all(name in last for last in lasts)]
    over = lambda name: [vital_signs.mean(last[name]) for last in lasts]
    return {name: float(np.mean(over(name))) for name in names}


def curve(row: Row) -> Curve:
    """Score before local training and bytes at the rounds that all seeds have: means over seeds."""
    by_round = [{line["round"]: line for line in run.metrics} for run in row.runs]
    rounds = sorted(set.intersection(*(set(lines) for lines in by_round)))
    name = score_name(row.runs[0].metrics)
    over = lambda value: [float(np.mean([value(lines[r]) for lines in by_round])) for r in rounds]
    return Curve(
        rounds,
        over(lambda line: number(line.get("bytes_down")) + number(line.get("bytes_up"))),
        over(lambda line: number((line["before"] or {}).get(f"{name}_mean"))),
    )


def paired(row: Row, first: Row, stage: str) -> Paired | str:
    """Row against first over clients x seeds, or why they cannot be paired.

    Paired are the clients over which a run's mean is taken, so that the mean difference is the
    difference of the rows' means.
    """
    if unfinished(row) or unfinished(first):
        return "unfinished"
    if [run.seed for run in row.runs] != [run.seed for run in first.runs]:
        return "other seeds"
    if problem(row.config) != problem(first.config):
        return "other clients"
    ours, theirs = _scores(row, stage), _scores(first, stage)
    if ours.keys() != theirs.keys() or not ours:
        return "other clients"
    # To twelve digits: 0.9 - 0.8 and 0.3 - 0.2 are a tie, which binary fractions would break.
    difference = np.round([ours[key] - theirs[key] for key in ours], 12)
    if np.isnan(difference).any():
        return "scores missing"
    p = float(wilcoxon(difference).pvalue) if difference.any() else 1.0
    return Paired(float(difference.mean()), p, len(difference))


def problem(config: Mapping[str, Any]) -> list[Any]:
    """What says which examples each client has."""
    own = [config.get(str(config.get(kind))) for kind in ("dataset", "partition")]
    return [*(config.get(key) for key in having("defines_data")), *own]


def _scores(row: Row, stage: str) -> dict[tuple[int, str, str], float]:
    """By seed, client and its number of test examples."""
    name = score_name(row.runs[0].metrics)
    last = (row.config.get("phases") or [{}])[-1]
    wanted = last.get("participants", row.config.get("participants")) != "held_out"
    return {
        (run.seed, client["client"], client["test_examples"]): number(client.get(f"{stage}_{name}"))
        for run in row.runs
        for client in run.clients
        if (client["active"] == "1") is wanted and int(client["test_examples"]) > 0
    }
