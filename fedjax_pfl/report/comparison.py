"""Comparison of runs: rows of runs with equal settings, means over seeds, and paired tests."""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata, wilcoxon

from fedjax_pfl.core import diagnostics
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import method_labels, run_reader
from fedjax_pfl.report.figures import Curve
from fedjax_pfl.report.html_page import flatten
from fedjax_pfl.report.numbers import direction, mean_score, metric_of, number
from fedjax_pfl.report.run_reader import Record, Run
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with
from fedjax_pfl.simulation.summaries import mean_std


class Row(NamedTuple):
    """One row of a comparison: runs with the same settings and different seeds."""

    label: str  # its settings that differ from other rows', such as "FedAvg, lr=0.1"
    config: Mapping[str, Any]  # settings of its runs without the seed, missing ones at defaults
    runs: Sequence[Run]  # sorted by seed


class Summary(NamedTuple):
    """Results of a row at the last evaluation.

    A score is a dict over seeds of the mean over clients: `mean`, sample deviation `std` (None for
    one seed) and number `seeds`.
    """

    before: Mapping[str, Any]  # before local training
    after: Mapping[str, Any] | None  # after it; None if not evaluated
    worst10: Mapping[str, Any]  # mean of the worst tenth of clients, before local training
    megabytes_down: float  # downloaded in the whole run by all clients, mean over seeds
    megabytes_up: float  # uploaded, otherwise like megabytes_down
    rounds: tuple[int, int]  # round of the last evaluation: fewest and most over the seeds


class PairedTest(NamedTuple):
    """Client-wise comparison of two rows; each client's difference is a mean over seeds."""

    difference: float  # mean over clients of the row's score minus the baseline's
    p: float  # two-sided Wilcoxon signed-rank test; 1 if there is no difference
    pairs: int  # number of clients
    better: int  # clients for which the row is better
    signed_ranks: float  # sum of the ranks of the absolute differences, with their signs


def read(directory: Path) -> Run:
    """Reads a run directory; raises UsageError if it has nothing to compare."""
    return check(run_reader.read(directory))


def check(run: Run) -> Run:
    """Returns the run; raises UsageError if it has no evaluation on test examples."""
    if not run.metrics[-1].get("before"):
        raise UsageError(f"{run.directory} has nothing to compare: no evaluation on test examples")
    return run


def group(runs: Sequence[Run]) -> list[Row]:
    """Groups runs that differ only in the seed into rows, in order of appearance.

    So do runs whose partition_seed differs as their seed does, see the setting own_partitions.
    Raises UsageError for two runs with equal settings and seed, or runs with different metrics.
    """
    directories = {metric_of(run.metrics).name: run.directory for run in reversed(runs)}
    if len(directories) > 1:
        (metric, directory), (first_metric, first_directory) = list(directories.items())[:2]
        raise UsageError(
            f"{first_directory} is scored by {first_metric} and {directory} by {metric}; compare "
            "runs with one score"
        )
    defaults = run_reader.default_settings()
    configs: dict[str, dict[str, Any]] = {}
    runs_by_seed: dict[str, dict[int, Run]] = {}
    for run in runs:
        config = result_settings(run.config, defaults)
        if run.examples != "":
            config["examples"] = run.examples or f"unknown in {run.directory}"
        key = json.dumps(config, sort_keys=True)
        configs[key] = config
        seeds = runs_by_seed.setdefault(key, {})
        if run.seed in seeds:
            raise UsageError(
                f"{seeds[run.seed].directory} and {run.directory} have the same settings and seed "
                f"{run.seed}; give one of them"
            )
        seeds[run.seed] = run
    _join_own_partitions(configs, runs_by_seed)
    return [
        Row(label, config, [seeds[seed] for seed in sorted(seeds)])
        for label, config, seeds in zip(
            labels(list(configs.values())), configs.values(), runs_by_seed.values(), strict=True
        )
    ]


def _join_own_partitions(
    configs: dict[str, dict[str, Any]], runs_by_seed: dict[str, dict[int, Run]]
) -> None:
    """Joins rows of one run each if partition_seed minus seed is the same in all of them.

    Both arguments have the same keys, one for each row. The first row takes the runs of the others,
    and the settings of the run with the lowest seed. Digests of examples may differ, because those
    of files depend on the partition; the row has one for each run.
    """
    by_settings: dict[str, list[str]] = {}
    for key, config in configs.items():
        others = {name: value for name, value in config.items() if name != "partition_seed"}
        if None not in {run.examples for run in runs_by_seed[key].values()}:
            others.pop("examples", None)
        by_settings.setdefault(json.dumps(others, sort_keys=True), []).append(key)
    for keys in by_settings.values():
        partition_seeds = [configs[key]["partition_seed"] for key in keys]
        seeds = [seed for key in keys for seed in runs_by_seed[key]]
        offsets = {
            partition_seed - seed
            for key, partition_seed in zip(keys, partition_seeds, strict=True)
            for seed in runs_by_seed[key]
        }
        if len(keys) > 1 and len(offsets) == 1 and len(set(seeds)) == len(seeds):
            configs[keys[0]] |= {"partition_seed": min(partition_seeds), "own_partitions": True}
            for key in keys[1:]:
                runs_by_seed[keys[0]] |= runs_by_seed.pop(key)
                del configs[key]
            if "examples" in configs[keys[0]]:
                runs = runs_by_seed[keys[0]]
                configs[keys[0]]["examples"] = ", ".join(
                    str(runs[s].examples) for s in sorted(runs)
                )


def result_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run that affect the results, without the seed, as a nested dict.

    Settings that `config` lacks are at their defaults. Sub-configs that it lacks are left out.
    """
    defaults_of_run = {
        key: value for key, value in defaults.items() if not isinstance(value, Mapping)
    }
    merged = {
        key: {**defaults[key], **value} if isinstance(defaults.get(key), Mapping) else value
        for key, value in {**defaults_of_run, **config}.items()
    }
    return {k: v for k, v in merged.items() if k not in {*settings_with("resumable"), "seed"}}


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a label per configuration of the settings that differ, such as "FedAvg, lr=0.1"."""
    flat_configs = [dict(flatten(config)) for config in configs]
    values: dict[str, set[str]] = {}
    for config in flat_configs:
        for key, value in config.items():
            values.setdefault(key, set()).add(value)
    differing = [key for key in values if len(values[key]) > 1]
    kinds = [key for key in configuration.Registry._fields if key in differing]
    keys = sorted(set(differing) - set(kinds), key=lambda key: ("." in key, key))

    def label(config: Mapping[str, str], keys: Sequence[str]) -> str:
        """Returns the values of `kinds`, then KEY=VALUE for `keys`, joined by commas."""
        parts = [
            method_labels.table_label(config[key]) if key == "algorithm" else config[key]
            for key in kinds
            if key in config
        ]
        parts += [f"{key}={config[key]}" for key in keys if key in config]
        text = ", ".join(parts) or method_labels.table_label(config.get("algorithm", "?"))
        return text.encode("utf-8", "backslashreplace").decode("utf-8")  # a path may be no UTF-8

    row_labels = [label(config, keys) for config in flat_configs]
    if len(set(row_labels)) < len(row_labels):
        # Add settings that only some configurations have, such as those of another version.
        partial = {key for key in values if not all(key in config for config in flat_configs)}
        keys = [*keys, *sorted(partial - set(keys))]
        row_labels = [label(config, keys) for config in flat_configs]
    return row_labels


def is_variant(row: Row) -> bool:
    """Returns True if a row's method is a variant of this library."""
    return method_labels.is_variant(str(row.config.get("algorithm")))


def unfinished(row: Row) -> str:
    """Returns text on runs that lack rounds, such as "seed 1 unfinished, round 40", "" if none.

    Runs that a callback ended are among them, as "seed 1 ended at round 40 of 50".
    """
    notes = []
    for run in row.runs:
        seed, last = f"seed {run.seed} " * (len(row.runs) > 1), run.metrics[-1]["round"]
        if not run.finished:
            notes.append(f"{seed}unfinished, round {last}")
        elif run.ended_early:
            notes.append(f"{seed}ended at round {last} of {run.rounds}")
    return ", ".join(notes)


def summary(row: Row) -> Summary:
    """Returns the results of a row's runs at their last evaluations, as means over seeds."""
    lasts = [run.metrics[-1] for run in row.runs]
    name = metric_of(lasts).name

    def spread(stage: str, key: str) -> dict[str, Any]:
        return mean_std([number(last[stage].get(f"{name}_{key}")) for last in lasts])

    def megabytes(key: str) -> float:
        return float(np.mean([number(last.get(key)) for last in lasts])) / 1e6

    rounds = [last["round"] for last in lasts]
    return Summary(
        before=spread("before", "mean"),
        after=spread("after", "mean") if all(last.get("after") for last in lasts) else None,
        worst10=spread("before", "worst10"),
        megabytes_down=megabytes("bytes_down"),
        megabytes_up=megabytes("bytes_up"),
        rounds=(min(rounds), max(rounds)),
    )


def diagnostic_values(row: Row) -> dict[str, float]:
    """Returns diagnostics of the last evaluations by name, means over layers and seeds."""
    lasts = [run.metrics[-1].get("diagnostics", {}) for run in row.runs]
    names = [name for name in lasts[0] if all(name in last for last in lasts)]
    per_seed = {name: [diagnostics.mean(last[name]) for last in lasts] for name in names}
    return {name: float(np.mean(values)) for name, values in per_seed.items()}


def curve(row: Row, metric: Metric) -> Curve:
    """Returns scores before local training, bytes and simulated seconds, by round of evaluation.

    The scores are of `metric`. The rounds are those evaluated under all seeds.
    """
    by_round = [{line["round"]: line for line in run.metrics} for run in row.runs]
    rounds = sorted(set.intersection(*(set(lines) for lines in by_round)))

    def values(value: Callable[[Record], float]) -> np.ndarray:  # [seeds, rounds]
        return np.array([[value(lines[r]) for r in rounds] for lines in by_round])

    moved = values(lambda line: number(line.get("bytes_down")) + number(line.get("bytes_up")))
    scores = values(lambda line: mean_score(line, metric, "before"))
    seconds = values(lambda line: number(line.get("simulated_seconds")))
    return Curve(
        rounds=rounds,
        bytes_moved=moved.mean(0).tolist(),
        score=scores.mean(0).tolist(),
        lowest=scores.min(0).tolist(),
        highest=scores.max(0).tolist(),
        seconds=[] if np.isnan(seconds).any() else seconds.mean(0).tolist(),
    )


def paired_test(row: Row, baseline: Row, stage: str) -> PairedTest | str:
    """Compares a row with a baseline of the same seeds and clients, client by client.

    A pair is one client, with the mean over seeds of its difference in score. Seeds are not
    independent samples, as a client's examples stay the same. Only clients that train and have test
    examples count or, in a run on held-out clients, only these. Clients that attack in any of the
    runs do not count. `stage` is "before" or "after" local training. If rows cannot be paired,
    returns the reason, such as "other seeds".
    """
    difference = _differences(row, baseline, stage)
    if isinstance(difference, str):
        return difference
    p = float(wilcoxon(difference).pvalue) if difference.any() else 1.0
    nonzero = difference[difference != 0]  # as in the test
    ranks = np.sign(nonzero) * rankdata(np.abs(nonzero))
    return PairedTest(
        difference=float(difference.mean()),
        p=p,
        pairs=len(difference),
        better=_count_better(row, difference),
        signed_ranks=float(ranks.sum()),
    )


def _count_better(row: Row, difference: np.ndarray) -> int:
    return int(np.sum(direction(metric_of(row.runs[0].metrics)) * difference > 0))


def extremes(
    row: Row, baseline: Row, stage: str
) -> tuple[tuple[str, float], tuple[str, float]] | None:
    """Returns (name, difference) of the client that gains most, and of the one that gains least.

    The difference is the score in `row` minus that in `baseline`, mean over seeds. Returns None if
    clients have no names or cannot be paired. `stage` is "before" or "after" local training.
    """
    difference = _differences(row, baseline, stage)
    names = {client["client"]: client.get("owner") for client in row.runs[0].clients}
    if isinstance(difference, str) or not any(names.values()):
        return None
    sign = direction(metric_of(row.runs[0].metrics))
    excluded = attackers([*row.runs, *baseline.runs])
    name = metric_of(row.runs[0].metrics).name
    clients = dict.fromkeys(client for _, client, _ in _scores(row, stage, name, excluded))
    gains = sorted(zip(clients, difference.tolist(), strict=True), key=lambda gain: sign * gain[1])
    worst, best = ((str(names[client]), value) for client, value in (gains[0], gains[-1]))
    return best, worst


def share_better_than_local(row: Row, rows: Sequence[Row]) -> float | None:
    """Returns the share, 0 to 1, of clients that score better than with Local on the same data.

    Scores are those before local training. Returns None if no other row of `rows` is such a run.
    """
    for candidate in rows:
        is_local = candidate.config.get("algorithm") == "local" and not candidate.config.get(
            "phases"
        )
        if is_local and candidate is not row:
            difference = _differences(row, candidate, "before")
            if not isinstance(difference, str):
                return _count_better(row, difference) / len(difference)
    return None


def _differences(row: Row, baseline: Row, stage: str) -> np.ndarray | str:
    """Returns the mean difference in score of each client over seeds, row minus baseline.

    `stage` is "before" or "after" local training. Returns an array [N], or the reason why the
    rows cannot be compared, such as "other seeds".
    """
    if not all(run.finished for run in [*row.runs, *baseline.runs]):
        return "unfinished"
    if [run.seed for run in row.runs] != [run.seed for run in baseline.runs]:
        return "other seeds"
    seeds = [[r.config.get("partition_seed", 0) for r in rows.runs] for rows in (row, baseline)]
    if seeds[0] != seeds[1] or data_settings(row.config) != data_settings(baseline.config):
        return "other clients"
    examples, baseline_examples = ([run.examples for run in r.runs] for r in (row, baseline))
    if examples != baseline_examples:
        return "other examples"
    if None in examples and row is not baseline:
        return "examples unknown"
    excluded = attackers([*row.runs, *baseline.runs])
    name = metric_of(row.runs[0].metrics).name
    scores, baseline_scores = (_scores(rows, stage, name, excluded) for rows in (row, baseline))
    if scores.keys() != baseline_scores.keys() or not scores:
        return "other clients"
    indices: dict[tuple[int, int], int] = {}  # by client and number of test examples
    index = [indices.setdefault(key[1:], len(indices)) for key in scores]
    if np.any(np.bincount(index) != len(row.runs)):
        return "other clients"
    gaps = np.array([scores[key] - baseline_scores[key] for key in scores])
    difference = np.bincount(index, gaps) / len(row.runs)
    if np.isnan(difference).any():
        return "scores missing"
    # Round to twelve digits of the scores: 0.9 - 0.8 and 0.3 - 0.2 must be a tie.
    largest = np.nanmax(np.abs([*scores.values(), *baseline_scores.values()]))
    return np.round(difference, 12 - int(np.ceil(np.log10(largest))) if largest > 0 else 12)


def data_settings(config: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the settings that decide which examples each client has, to compare."""
    kinds = ("dataset", "partition")
    sub_configs = [config.get(str(config.get(kind)).partition(":")[0]) for kind in kinds]
    return [*(config.get(key) for key in settings_with("defines_data")), *sub_configs]


def attackers(runs: Sequence[Run]) -> set[int]:
    """Returns the clients that attack in any of the runs; no mean includes their scores."""
    return {row["client"] for run in runs for row in run.clients if row.get("attacker")}


def scored_clients(run: Run) -> set[int]:
    """Returns the clients whose scores are in a run's means."""
    name, row = metric_of(run.metrics).name, Row("", run.config, [run])
    return {client for _, client, _ in _scores(row, "before", name, attackers([run]))}


def _scores(
    row: Row, stage: str, metric_name: str, excluded: Container[int]
) -> dict[tuple[int, int, int], float]:
    """Returns the final scores of clients by (seed, client, number of test examples).

    `stage` is "before" or "after" local training. Only clients that take part in the last phase and
    are not in `excluded` are in it.
    """
    return {
        (run.seed, client["client"], client["test_examples"]): number(
            client.get(f"{stage}_{metric_name}")
        )
        for run in row.runs
        for client in run.participants
        if client["client"] not in excluded and (client.get("test_examples") or 0) > 0
    }
