"""Reference runs of a report: named by the setting `reference_runs`, or trained by `reference`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl import transforms
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import multiprocess

# `references` is imported in functions: the import takes half a second, and few runs need it.


def check_settings(
    settings: ConfigDict,
    configs: Iterable[ConfigDict],
    workdir: str | Path | None,
    registry: configuration.Registry,
) -> None:
    """Raises UsageError if the settings `reference` or `reference_runs` cannot be satisfied.

    `configs` has the configuration of each run that `seeds` and `sweep` in `settings` request.
    `workdir` is the folder of the runs; None if nothing is written.
    """
    name = "reference_runs" if settings.reference_runs else "reference"
    if not (settings.reference or settings.reference_runs):
        return
    if workdir is None:
        raise UsageError(f"{name} is for a run with a workdir, in which its report is written")
    if multiprocess.count() > 1:
        raise UsageError(f"{name} is for one process; compare with fedjax-pfl compare")
    if settings.reference_runs:
        from fedjax_pfl.report import references

        resolved = [
            run_reader.as_json(configuration.resolve(config, registry)) for config in configs
        ]
        references.check_same_work(resolved, references.read_finished(settings.reference_runs))


def check_data(
    configs: Iterable[Mapping[str, Any]], facts: Sequence[Mapping[str, Any]], metric: str
) -> None:
    """Raises UsageError if a run that `reference_runs` names has other examples, or no `metric`.

    `configs` are resolved configurations of runs; `facts` has the content of data.json of each of
    their partitions; `metric` is the name of the task's first metric.
    """
    digests = {partition_facts.get("digest", "") for partition_facts in facts}
    for directories in {str(config.get("reference_runs") or "") for config in configs} - {""}:
        from fedjax_pfl.report import references

        runs = references.read_finished(directories)
        references.check_metric(metric, runs)
        for run in runs:
            if run.examples not in digests:
                raise UsageError(
                    f"{run.directory} is a run on other examples, or its data.json is missing; it "
                    "cannot be a reference run of this one"
                )


def named_runs(run: run_reader.Run) -> dict[str, run_reader.Run]:
    """Returns the runs that the setting `reference_runs` names and that are comparable, by name."""
    if not (directories := run.config.get("reference_runs")):
        return {}
    from fedjax_pfl.report import references

    return references.same_work(run, references.read_finished(directories))


def report_outdated(run: run_reader.Run) -> bool:
    """Returns True if a run has no report.html, or one older than that of a reference run."""
    report = run.directory / run_reader.REPORT
    if not report.exists():
        return True
    from fedjax_pfl.report import references

    written = report.stat().st_mtime_ns
    neighbours = references.find(run).values()
    return any((r.directory / run_reader.REPORT).stat().st_mtime_ns > written for r in neighbours)


def missing_runs(
    run: run_reader.Run, settings: ConfigDict, registry: configuration.Registry
) -> dict[Path, ConfigDict]:
    """Returns the runs of Local and FedAvg to train: configurations by run directory.

    They are the missing ones if the setting `reference` is True; otherwise there are none.
    """
    from fedjax_pfl.report import method_labels, references

    existing = set(references.comparable(run, references.find(run)))
    existing |= {method_labels.title(named_run.config) for named_run in named_runs(run).values()}
    trained = method_labels.methods(run.config)
    return {
        run.directory / references.FOLDER / method: _reference(settings, method, registry)
        for method, name in references.METHODS.items()
        if settings.reference and name not in existing and [method] != trained
    }


def _reference(settings: ConfigDict, method: str, registry: configuration.Registry) -> ConfigDict:
    """Returns settings for `method`: those of the last phase, all rounds, and no transforms.

    Only attacks stay. A late client of Local has no update, because Local cannot use partial work.
    """
    phases = configuration.phases(settings, registry)
    config = phases[-1].copy_and_resolve_references()
    config.update(algorithm=method, rounds=sum(phase.rounds for phase in phases))
    config.update(reference=False, reference_runs="", sweep="", seeds=1)
    removed = transforms.SETTINGS.keys() - transforms.ATTACK.settings.keys()
    config.update({name: transforms.SETTINGS[name].default_value for name in sorted(removed)})
    if method == "local":  # has no mean of uploads, which partial work needs
        config.late = "missing"
    return config
