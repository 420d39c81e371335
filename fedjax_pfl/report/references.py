"""Reference runs: Local and FedAvg on the same data, seed and network.

Reference runs are found next to a run directory and in its folder `reference`, where the setting
`reference` puts them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, method_labels, run_reader
from fedjax_pfl.report.comparison import PairedTest, Row
from fedjax_pfl.report.html_page import flatten
from fedjax_pfl.report.numbers import (
    direction,
    format_p,
    format_score,
    mean_score,
    metric_of,
    metrics_of,
)
from fedjax_pfl.report.run_reader import Run
from fedjax_pfl.settings.configuration import Registry
from fedjax_pfl.settings.general import SETTING_GROUPS, settings_with
from fedjax_pfl.transforms import ATTACK
from fedjax_pfl.transforms import SETTINGS as TRANSFORM_SETTINGS

METHODS = {name: method_labels.table_label(name) for name in ("fedavg", "local")}
FOLDER = "reference"  # in a run directory
_MAX_DIRECTORIES = 2000  # to search
_MAX_LISTED = 4  # settings in a message
# Settings of the method, or without effect on the scores before local training.
_IGNORED = {"algorithm", "phases", *TRANSFORM_SETTINGS, *SETTING_GROUPS["Evaluation"]}
_IGNORED -= {"evaluate_clients", *ATTACK.settings}
_TRANSFORMS_WITHOUT_ATTACK = TRANSFORM_SETTINGS.keys() - ATTACK.settings.keys()
STAGES = {"before": "As served", "after": "After one more local training"}


def as_row(run: Run) -> Row:
    """Returns a run as a row of a comparison, labelled by its method."""
    return Row(str(run.config.get("algorithm")), run.config, [run])


def work(config: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the settings for data, seed and network, equal for comparable runs."""
    network = [config.get("model"), config.get(str(config.get("model"))), config.get("groups")]
    return [*comparison.data_settings(config), config.get("seed"), network]


def read_finished(directories: str) -> list[Run]:
    """Reads runs from directories separated by commas; raises UsageError if one is unfinished."""
    runs = []
    for directory in filter(None, map(str.strip, directories.split(","))):
        run = comparison.read(Path(directory))
        if not run.finished:
            raise UsageError(f"{directory} holds an unfinished run; run its command again")
        runs.append(run)
    return runs


def check_same_work(configs: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> None:
    """Raises UsageError for a run whose data, seed and network match no configuration."""
    defaults = run_reader.default_settings()

    def settings(config: Mapping[str, Any]) -> dict[str, Any]:
        return comparison.result_settings(config, defaults) | {"seed": config.get("seed")}

    all_settings = list(map(settings, configs))
    for run in runs:
        run_settings = settings(run.config)
        if any(work(candidate) == work(run_settings) for candidate in all_settings):
            continue
        first = all_settings[0]
        kinds = [kind for kind in Registry._fields if kind != "algorithm"]
        relevant = {*settings_with("defines_data"), *kinds, "groups", "seed"}
        relevant |= {str(first.get(kind)) for kind in kinds}
        differing = [
            key for key in different_settings(first, run_settings) if key.split(".")[0] in relevant
        ]
        raise UsageError(
            f"{run.directory} cannot be compared with this run: it differs in "
            f"{', '.join(differing[:_MAX_LISTED])}"
        )


def check_metric(metric: str, runs: Sequence[Run]) -> None:
    """Raises UsageError for a run that has no scores of `metric`."""
    for run in runs:
        if metric not in [scored.name for scored in metrics_of(run.metrics)]:
            raise UsageError(
                f"{run.directory} cannot be compared with this run: it has no {metric}; run it "
                "again with the same metrics in another directory"
            )


def same_work(run: Run, candidates: Sequence[Run]) -> dict[str, Run]:
    """Returns the candidates with the data, seed, network and first metric of `run`, by label.

    The label is the method's; of several runs of one method it also has the directory's name. There
    are none if the examples of `run` are unknown.
    """
    usable = [
        reference
        for reference in candidates
        if work(reference.config) == work(run.config)
        and reference.examples == run.examples
        and run.examples is not None
        and _has_metric_of(run, reference)
    ]
    titles = [method_labels.title(reference.config) for reference in usable]
    labels = [
        f"{title}, {reference.directory.name}" if titles.count(title) > 1 else title
        for title, reference in zip(titles, usable, strict=True)
    ]
    if len(set(labels)) < len(labels):  # directories of one name in different folders
        labels = [str(reference.directory) for reference in usable]
    return dict(zip(labels, usable, strict=True))


def _has_metric_of(run: Run, reference: Run) -> bool:
    """Returns True if a reference run has scores of the metric that is drawn for `run`."""
    return metric_of(run.metrics) in metrics_of(reference.metrics)


def find(run: Run) -> dict[str, Run]:
    """Finds finished runs of FedAvg and Local with data, seed and network of `run`, by label.

    They have its first metric. It looks in the folder of `run` and in those beside it. Of several
    runs it takes the one with the most settings in common, then the first by name. It finds none if
    the examples of `run` are unknown.
    """
    if run.examples is None:
        return {}
    defaults = run_reader.default_settings()
    settings = comparison.result_settings(run.config, defaults)
    run_work = work(settings | {"seed": run.config.get("seed")})
    best: dict[str, tuple[int, Run]] = {}
    for path in _candidates(run.directory):
        try:
            config = run_reader.read_config(path)
            method = str(config.get("algorithm"))
            if method not in METHODS or [method] == method_labels.methods(run.config):
                continue
            reference_settings = comparison.result_settings(config, defaults)
            reference_settings |= {"seed": config.get("seed")}
            if reference_settings.get("phases") or work(reference_settings) != run_work:
                continue
            if any(
                reference_settings[name] != defaults[name] for name in _TRANSFORMS_WITHOUT_ATTACK
            ):
                continue  # such as FedAvg with noise, which is no baseline
            reference = comparison.read(path)
        except UsageError:
            continue  # damaged, or nothing to compare yet
        distance = len(training_differences(run, reference))
        is_comparable = reference.finished and reference.examples == run.examples
        is_comparable = is_comparable and _has_metric_of(run, reference)
        if is_comparable and (method not in best or distance < best[method][0]):
            best[method] = distance, reference
    return {METHODS[method]: best[method][1] for method in METHODS if method in best}


def _candidates(directory: Path) -> Iterator[Path]:
    """Yields directories of possible reference runs of the run in `directory`, at most 2,000.

    They are in its folder `reference`, next to it, or in a folder `reference` next to it.
    """
    count = 0
    for pattern, folder in (
        (f"{FOLDER}/*/config.json", directory),
        ("*/config.json", directory.parent),
        (f"*/{FOLDER}/*/config.json", directory.parent),
    ):
        for path in sorted(folder.glob(pattern)):
            if path.parent.resolve() != directory.resolve():
                yield path.parent
                count += 1
            if count >= _MAX_DIRECTORIES:
                return


def different_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Returns dotted names of settings that both have with different values, except the method."""
    second_settings = dict(flatten(second))
    return [
        key
        for key, value in flatten(first)
        if key not in ("algorithm", "phases") and second_settings.get(key, value) != value
    ]


def sentence(run: Run, name: str, reference: Run) -> str:
    """Returns sentences that compare a run with a reference run, before and after local training.

    They end with other settings that differ. `name` is the label of the reference run's method.
    """
    parts = [stage_sentence(run, name, reference, stage, intro) for stage, intro in STAGES.items()]
    return f"{' '.join(filter(None, parts))}{settings_note(run, reference)}"


def comparable(run: Run, reference_runs: Mapping[str, Run]) -> dict[str, Run]:
    """Returns the runs of `reference_runs`, by label, that differ from a run only in the method."""
    return {
        name: reference
        for name, reference in reference_runs.items()
        if not training_differences(run, reference)
    }


def settings_note(run: Run, reference: Run) -> str:
    """Returns a sentence on settings that differ, except the method, or "" if none."""
    differing = training_differences(run, reference)
    return f" The two runs also differ in {_listed(differing)}." if differing else ""


def no_verdict_note(run: Run, reference_runs: Mapping[str, Run]) -> str:
    """Returns text on the settings that differ in the reference runs, and what to do."""
    differences = "; ".join(
        f"that of {name} ({reference.directory.name}) differs in "
        f"{_listed(training_differences(run, reference))}"
        for name, reference in reference_runs.items()
    )
    return (
        "There is no finished run of Local or FedAvg with the same settings: "
        f"{differences}. The setting reference=true trains both with this run's settings."
    )


def training_differences(run: Run, reference: Run) -> list[str]:
    """Returns the dotted names of settings that differ between two runs, except the method.

    Settings of transforms and evaluation do not count, except the attack and the choice of
    evaluated clients. Nor does `late` if one run is Local's, which cannot use partial work. A run
    of several phases counts as one phase, with the settings of the last, as the setting `reference`
    trains it. Its rounds are those at the last evaluation: a callback can end a run before the
    rounds of its settings.
    """
    defaults, settings = run_reader.default_settings(), []
    for config, metrics in ((run.config, run.metrics), (reference.config, reference.metrics)):
        phases = list(method_labels.phases(comparison.result_settings(config, defaults)))
        rounds = metrics[-1]["round"] if metrics else 0
        settings.append({**phases[-1], "rounds": rounds})
    differing = different_settings(settings[0], settings[1])
    ignored = _IGNORED | ({"late"} if "local" in [s["algorithm"] for s in settings] else set())
    differing = [key for key in differing if key.split(".")[0] not in ignored]
    scored, reference_scored = (comparison.scored_clients(r) for r in (run, reference))
    if scored and reference_scored and scored != reference_scored and not differing:
        return ["the clients that are scored"]
    return differing


def _listed(names: Sequence[str]) -> str:
    """Returns up to four names as text, and the number of the others."""
    count = len(names) - _MAX_LISTED
    suffix = f" and {count} more" if count > 0 else ""
    return f"{', '.join(names[:_MAX_LISTED])}{suffix}"


def stage_sentence(run: Run, name: str, reference: Run, stage: str, intro: str) -> str:
    """Returns a sentence, after `intro`, on how a run's last score compares with a reference run's.

    It has both scores and, if clients can be paired, p; "" if one run has no such score. `stage` is
    "before" or "after" local training.
    """
    metric = metric_of(run.metrics)
    score, reference_score = (mean_score(r.metrics[-1], metric, stage) for r in (run, reference))
    if math.isnan(score) or math.isnan(reference_score):  # not evaluated, or not finite
        return ""
    gain = (score - reference_score) * direction(metric)
    size = f"{100 * abs(gain):.2f} points" if metric.unit == "%" else f"{abs(gain):.4g}"
    verdict = f"{size} better than" if gain > 0 else f"{size} worse than" if gain else "as good as"
    scores = f"{format_score(metric, score)} against {format_score(metric, reference_score)}"
    test = comparison.paired_test(as_row(run), as_row(reference), stage)
    note = ""
    if isinstance(test, PairedTest):
        note = f"; better for {test.better} of {test.pairs} clients, p = {format_p(test.p)}"
    return f"{intro} it is {verdict} {name} ({scores}{note})."
