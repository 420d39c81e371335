"""The second table of the FedMN paper; the first one describes its data."""

from ml_collections import ConfigDict

from experiments.papers.table import Quick, Table, accuracy, published
from fedjax_pfl.presets import fedmn as presets

PUBLISHED = published("fedmn")


def settings(method: str, dataset: str, rounds: int | None) -> ConfigDict:
    """Returns a preset; `rounds` are divided between its phases in the preset's proportion."""
    config = presets.get_config(f"{dataset}-{method}")
    if rounds and config.phases:
        pretraining = config.phases[0]["rounds"]
        first = rounds * pretraining // (pretraining + config.rounds)
        early, late = {**config.phases[0], "rounds": first}, {"rounds": rounds - first}
        config.phases = (early, late) if first else ()
    config.rounds = rounds or config.rounds
    return config


TABLES = {
    "table2": Table(
        about=f"{PUBLISHED['source'].partition(', tables')[0]}, table II: eight methods",
        measured="accuracy in per cent as served; the paper's networks of cifar10 and cifar100 are "
        "pre-trained on ImageNet, ours are not",
        cells=PUBLISHED["table2"]["rows"],
        dataset=lambda column: column,
        settings=lambda method, column, dataset, rounds: settings(method, dataset, rounds),
        measures=lambda column: (accuracy, None),
        second="",
        quick=Quick(("cifar10",), 30),
        variants=("fedmn_correlation",),
    ),
}
