"""The second table of the FedMN paper; the first one describes its data."""

from ml_collections import ConfigDict

from experiments.papers.table import Quick, Table, accuracy, published
from fedjax_pfl.presets import fedmn as presets

PUBLISHED = published("fedmn")


def settings(method: str, dataset: str, rounds: int | None) -> ConfigDict:
    """Returns a preset; `rounds` are shared by FedMN and its pre-training as they are there."""
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
        f"{PUBLISHED['source'].partition(', tables')[0]}, table II: eight methods",
        "accuracy in per cent as served; the networks of cifar10 and cifar100 were "
        "pre-trained on ImageNet there, and start from nothing here",
        PUBLISHED["table2"]["rows"],
        lambda column: column,
        lambda method, column, dataset, rounds: settings(method, dataset, rounds),
        lambda column: (accuracy, None),
        "",
        Quick(("cifar10",), 30),
        variants=("fedmn_correlation",),
    ),
}
