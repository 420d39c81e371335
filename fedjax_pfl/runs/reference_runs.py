"""Reference runs of a report: named by the setting `beside`, or trained by `reference`."""

from collections.abc import Iterable, Mapping
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
    """Raises UsageError if the settings `reference` or `beside` cannot be satisfied.

    `configs` has the configuration of each run of the settings.
    """
    name = "beside" if settings.beside else "reference"
    if not (settings.reference or settings.beside):
        return
    if workdir is None:
        raise UsageError(f"{name} is for a run with a workdir, in which its report is written")
    if multiprocess.count() > 1:
        raise UsageError(f"{name} is for one process; compare with fedjax-pfl compare")
    if settings.beside:
        from fedjax_pfl.report import references

        resolved = [
            run_reader.as_json(configuration.resolve(config, registry)) for config in configs
        ]
        references.check_same_work(resolved, references.read_finished(settings.beside))


def check_examples(configs: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Raises UsageError if a run that `beside` names has other examples.

    `facts` is the content of data.json.
    """
    for directories in {str(config["beside"]) for config in configs if config.get("beside")}:
        from fedjax_pfl.report import references

        for run in references.read_finished(directories):
            if run.examples != facts.get("digest", ""):
                raise UsageError(
                    f"{run.directory} is a run on other examples, or its data.json is missing; it "
                    "cannot be set beside this one"
                )


def named_runs(run: run_reader.Run) -> dict[str, run_reader.Run]:
    """Returns the runs that the setting `beside` names and that are comparable, by name."""
    if not (directories := run.config.get("beside")):
        return {}
    from fedjax_pfl.report import references

    return references.same_work(run, references.read_finished(directories))


def missing_runs(
    run: run_reader.Run, settings: ConfigDict, registry: configuration.Registry
) -> dict[Path, ConfigDict]:
    """Returns the runs of Local and FedAvg that `reference` requires and that do not exist.

    Configurations are by run directory.
    """
    from fedjax_pfl.report import references

    existing = {**references.find(run), **named_runs(run)}
    return {
        run.directory / references.FOLDER / method: _reference(settings, method, registry)
        for method, name in references.METHODS.items()
        if settings.reference and name not in existing and method != settings.algorithm
    }


def _reference(settings: ConfigDict, method: str, registry: configuration.Registry) -> ConfigDict:
    """Returns the configuration of a reference run: the last phase with the rounds of all."""
    phases = configuration.phases(settings, registry)
    config = phases[-1].copy_and_resolve_references()
    config.update(algorithm=method, rounds=sum(phase.rounds for phase in phases))
    config.update(reference=False, beside="", sweep="", seeds=1)
    config.update({name: row.default_value for name, row in transforms.SETTINGS.items()})
    return config
