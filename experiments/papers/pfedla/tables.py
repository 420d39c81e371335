"""The tables of the pFedLA paper: two splits, ten methods; and retained layers against bytes."""

from functools import partial
from typing import Any

from ml_collections import ConfigDict

from experiments.papers.table import Published, Quick, Table, accuracy, after, moved, published
from fedjax_pfl.presets import pfedla as presets

# What a row changes besides the algorithm.
CHANGES: dict[str, dict[str, Any]] = {
    "heurpfedla": {"algorithm": "pfedla", "pfedla": {"k": 1}},
    # FedFomo weighs its peers on validation examples, a fifth of what others train on.
    "fedfomo": {"validation_fraction": 0.14},
    # pFedMe's own R and K: 100 gradients, where others take 50 on CIFAR-10 and 30 on EMNIST.
    "pfedme": {"local_epochs": None, "local_steps": 20, "pfedme": {"inner_steps": 5}},
}
PUBLISHED = published("pfedla")


def row(method: str, partition: str, dataset: str, clients: int) -> ConfigDict:
    """Returns the settings of one cell of the first two tables."""
    config = presets.get_config(f"{dataset}-n{clients}")
    config.partition = partition
    config.update({"algorithm": method, **CHANGES.get(method, {})})
    if method == "fedrep":  # the others' epochs, half for the body and half for the head
        body = config.local_epochs // 2
        config.update(local_epochs=body, fedrep={"head_epochs": config.local_epochs - body})
    return config


def retained(k: int, dataset: str) -> ConfigDict:
    """Returns the settings of one row of the third table."""
    config = presets.get_config(f"{dataset}-n10")
    config.pfedla.k = k
    return config


def _dataset(column: str) -> str:
    """Returns a column's dataset. EMNIST's ten digits: their network has the bytes of table 3."""
    return column.partition("-")[0]


def _settings(
    partition: str, method: str, column: str, dataset: str, rounds: int | None
) -> ConfigDict:
    clients = int(column.partition("-n")[2]) if dataset == _dataset(column) else 10
    config = row(method, partition, dataset, clients)
    config.rounds = rounds or config.rounds
    return config


def _retained(line: str, column: str, dataset: str, rounds: int | None) -> ConfigDict:
    config = retained(int(line.removeprefix("k=")), dataset)
    kind = "mebibytes" if column.endswith("MiB") else "accuracy"
    config.rounds = rounds or PUBLISHED["table3"]["rounds"][kind]
    return config


def _shrink(config: ConfigDict) -> None:
    config.classes.examples = config.dominant.examples = 100


def _without_batch_norm(config: ConfigDict) -> str:
    without = config.algorithm == "fedbn" and not config[config.model].batch_norm
    return "no BatchNorm in this network" if without else ""


def _third() -> dict[str, dict[str, Published]]:
    table3 = PUBLISHED["table3"]
    rows: dict[str, dict[str, Published]] = {}
    for name in ("emnist_digits", "cifar10"):
        for i, k in enumerate(table3[name]["k"]):
            rows.setdefault(f"k={k}", {}).update(
                {
                    f"{name}-accuracy": table3[name]["accuracy"][i],
                    f"{name}-MiB": table3[name]["mebibytes"][i],
                }
            )
    return rows


_PAPER = PUBLISHED["source"].partition(", tables")[0]
_ROUNDS = 20
_LIGHT = dict.fromkeys(("cifar10", "emnist_digits", "fashion_mnist"), 4)
_OURS = "accuracy in per cent before local training; the paper does not say before or after"
TABLES = {
    **{
        name: Table(
            about=f"{_PAPER}, table {name[-1]}: ten methods, {split}",
            measured=_OURS,
            cells=PUBLISHED[name]["rows"],
            dataset=_dataset,
            settings=partial(_settings, PUBLISHED[name]["partition"]),
            measures=lambda column: (accuracy, after),
            second="after",
            quick=Quick(("cifar10-n10",), _ROUNDS, _LIGHT, _shrink),
            impossible=_without_batch_norm,
        )
        for name, split in (
            ("table1", "a few random classes per client"),
            ("table2", "all classes, some of them dominant"),
        )
    },
    "table3": Table(
        about=f"{_PAPER}, table 3: k retained layers",
        measured="accuracy in per cent before local training; MiB of all clients, both directions "
        "(the published ones are those of 75 rounds)",
        cells=_third(),
        dataset=_dataset,
        settings=_retained,
        measures=lambda column: (
            (lambda run: moved(run) / 2**20, None) if column.endswith("MiB") else (accuracy, after)
        ),
        second="after",
        quick=Quick(("cifar10-accuracy", "cifar10-MiB"), _ROUNDS, _LIGHT, _shrink),
    ),
}
