"""Tables of the pFedHN paper: methods, network sizes, MNIST, spectral normalisation."""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.papers.table import Measure, Quick, Table, accuracy, accuracy_over, best, published
from fedjax_pfl.presets import pfedhn as presets

PUBLISHED = published("pfedhn")
_STEPS = 100
_PAPER = PUBLISHED["source"].partition(", tables")[0]
_OURS = "accuracy (%) of the served model at the evaluation with the best validation accuracy"


def settings(dataset: str, steps: int | None, *parts: str) -> ConfigDict:
    """Returns a preset with `steps` communication steps, or with the paper's number."""
    steps_part = [f"steps{steps}"] if steps else []
    return presets.get_config("-".join([dataset, *parts, *steps_part]))


def sizes(method: str, dataset: str, steps: int | None) -> ConfigDict:
    """Returns the settings of 75 clients (12 on digits) in three sizes, all in one run."""
    clients, cohort = (12, 3) if dataset == "digits" else (75, 15)
    config = settings(dataset, steps, "sizes", f"n{clients}", method)
    if method != "pfedhn":
        config.clients_per_round = cohort
    return config


def _dataset(column: str) -> str:
    return column.partition("-")[0]


def _clients(column: str, dataset: str) -> str:
    return column.partition("-")[2] if dataset == _dataset(column) else "n10"


def _method_settings(method: str, column: str, dataset: str, rounds: int | None) -> ConfigDict:
    return settings(dataset, rounds, _clients(column, dataset), method)


def _sizes(method: str, column: str, dataset: str, rounds: int | None) -> ConfigDict:
    return sizes(method, dataset, rounds)


def spectral(on: bool, dataset: str, clients: str, steps: int | None) -> ConfigDict:
    """Returns the settings of a run with or without spectral normalisation."""
    config = settings(dataset, steps, clients)
    config.pfedhn.spectral_norm = on
    return config


def _spectral(method: str, column: str, dataset: str, rounds: int | None) -> ConfigDict:
    return spectral(True, dataset, _clients(column, dataset), rounds)


def _size(column: str) -> tuple[Measure, Measure]:
    group = "SML".index(column[-1])

    def of_size(client: Mapping[str, Any], n: int) -> bool:
        return int(client["group"]) == group

    return accuracy_over(of_size, "best_before"), accuracy_over(of_size, "before")


def _table(
    name: str,
    title: str,
    settings: Callable[..., ConfigDict],
    columns: tuple[str, ...],
    light: dict[str, int] | None = None,
) -> Table:
    """Returns a table of the paper; `columns` and `light` are those of the quick scale."""
    return Table(
        about=f"{_PAPER}, table {name[-1]}: {title}",
        measured=_OURS,
        cells=PUBLISHED[name]["rows"],
        dataset=_dataset,
        settings=settings,
        measures=lambda column: (best, accuracy),
        second="last",
        quick=Quick(columns, _STEPS, light or {}),
    )


_SIZED = ("cifar10-S", "cifar10-M", "cifar10-L")
TABLES = {
    "table1": _table("table1", "eight methods", _method_settings, ("cifar10-n10",)),
    "table2": _table("table2", "networks of three sizes", _sizes, _SIZED)._replace(
        measured=f"{_OURS}, over the clients of one size", measures=_size
    ),
    "table3": _table(
        "table3", "one hidden layer", _method_settings, ("mnist-n10",), {"mnist": _STEPS}
    ),
    "table4": _table("table4", "spectral normalisation", _spectral, ("cifar10-n10",)),
}
