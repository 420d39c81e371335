"""Table 1 of the Factorized-FL paper: two datasets in four settings, domains, and bytes."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.papers.table import (
    Measure,
    Published,
    Quick,
    Table,
    accuracy,
    accuracy_over,
    after,
    moved,
    published,
)
from fedjax_pfl.data.partitions import domain_of
from fedjax_pfl.presets import factorized_fl as presets

PUBLISHED = published("factorized_fl")
_PAPER = PUBLISHED["source"].partition(", table")[0]
# Parts of the presets of the rows, and changes of the presets. The paper states six times FedAvg's
# bytes for FedFomo; five models down and one up are three times as much.
ROWS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedprox": {},
    "clustered_fl": {},
    "per_fedavg": {},
    "fedfomo": {"fedfomo": {"peers": 5}},
    "pfedpara": {},
    "alpha": {},
    "beta": {},
}
DOMAINS = ("household", "food", "trees_flowers", "transport", "animals")


def settings(method: str, setting: str, dataset: str, rounds: int | None) -> ConfigDict:
    """Returns the settings of a method in a setting of the preset on a dataset."""
    config = presets.get_config(f"{dataset}-{setting}-{method}")
    config.update(ROWS.get(method, {}))
    config.rounds = rounds or config.rounds
    return config


def _columns() -> dict[str, dict[str, Published]]:
    """Returns the cells by row, with the columns of the table's three parts side by side."""
    table: dict[str, dict[str, Published]] = {name: {} for name in ROWS}
    for part, rows in PUBLISHED["table1"].items():
        for name, cells in rows.items():
            renamed = {key.replace("gigabytes", "GB"): value for key, value in cells.items()}
            table[name] |= {f"{part}-{key}": value for key, value in renamed.items()}
    return table


def _dataset(column: str) -> str:
    part = column.partition("-")[0]
    return "cifar100" if part == "domains" else part


def _settings(method: str, column: str, dataset: str, rounds: int | None) -> ConfigDict:
    part, _, setting = column.partition("-")
    # The paper prints the same bytes for the four settings of a dataset.
    setting = "domains" if part == "domains" else "iid" if setting == "GB" else setting
    return settings(method, setting, dataset, rounds)


def _measures(column: str) -> tuple[Measure, Measure | None]:
    kind = column.partition("-")[2]
    if kind == "GB":
        return (lambda run: moved(run) / 1e9), None
    if kind not in DOMAINS:
        return after, accuracy

    def is_in_domain(client: Mapping[str, Any], clients: int) -> bool:
        domains = domain_of(clients, len(DOMAINS))
        return bool(domains[int(client["client"])] == DOMAINS.index(kind))

    return accuracy_over(is_in_domain, "after"), accuracy_over(is_in_domain, "before")


TABLES = {
    "table1": Table(
        about=f"{_PAPER}, table 1: nine methods",
        measured="accuracy in per cent after local training; GB of all clients, both directions",
        cells=_columns(),
        dataset=_dataset,
        settings=_settings,
        measures=_measures,
        second="before",
        quick=Quick(("cifar10-permuted-noniid",), 10),
        variants=("factorized_fl_moved-alpha", "factorized_fl_moved-beta"),
    ),
}
