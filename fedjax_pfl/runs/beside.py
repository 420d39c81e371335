"""Runs of the same work that the report sets beside a run: those that are given, or asked for."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl import transforms
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import multiprocess

# What draws takes half a second to import, and only some runs come here: references is imported
# where it is used.


def check(
    settings: ConfigDict,
    each: Iterable[ConfigDict],
    workdir: str | Path | None,
    words: configuration.Registry,
) -> None:
    """UsageError where `reference` or `beside` asks for what cannot be.

    Args:
      each: the configurations of the runs that `settings` lead to.
    """
    asked = "beside" if settings.beside else "reference"
    if not (settings.reference or settings.beside):
        return
    if workdir is None:
        raise UsageError(f"{asked} is for a run with a workdir, in which its report is written")
    if multiprocess.count() > 1:
        raise UsageError(f"{asked} is for one process; compare with fedjax-pfl compare")
    if settings.beside:
        from fedjax_pfl.report import references

        resolved = [run_reader.as_read(configuration.resolve(one, words)) for one in each]
        references.check(resolved, references.given(settings.beside))


def check_examples(configs: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Raises UsageError if a run that `beside` names has other examples than those of data.json."""
    for named in {str(config["beside"]) for config in configs if config.get("beside")}:
        from fedjax_pfl.report import references

        for run in references.given(named):
            if run.examples != facts.get("digest", ""):
                raise UsageError(
                    f"{run.directory} is a run on other examples, or its data.json is missing; it "
                    "cannot be set beside this one"
                )


def given(run: run_reader.Run) -> dict[str, run_reader.Run]:
    """The runs that its setting `beside` names, as far as they are of the same work."""
    if not (named := run.config.get("beside")):
        return {}
    from fedjax_pfl.report import references

    return references.same_work(run, references.given(named))


def missing(
    run: run_reader.Run, settings: ConfigDict, words: configuration.Registry
) -> dict[Path, ConfigDict]:
    """Runs of Local and FedAvg that `reference` asks for and that are not there, by directory."""
    from fedjax_pfl.report import references

    there = {**references.find(run), **given(run)}
    return {
        run.directory / references.FOLDER / method: _reference(settings, method, words)
        for method, name in references.METHODS.items()
        if settings.reference and name not in there and method != settings.algorithm
    }


def _reference(settings: ConfigDict, method: str, words: configuration.Registry) -> ConfigDict:
    """The same work by another method: one phase as the last one, with the rounds of all."""
    each = configuration.phases(settings, words)
    one = each[-1].copy_and_resolve_references()
    one.update(algorithm=method, rounds=sum(phase.rounds for phase in each))
    one.update(reference=False, beside="", sweep="", seeds=1)
    one.update({name: row.default_value for name, row in transforms.SETTINGS.items()})
    return one
