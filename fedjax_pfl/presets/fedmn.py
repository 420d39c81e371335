"""FedMN and the methods that its paper compares with, on the testbed of FedEM that it uses.

fedjax-pfl fedmn --config=fedmn:cifar10

Presets are words joined with dashes: a dataset (digits; mnist; the testbed's cifar10, cifar100,
emnist_byclass and femnist), another method instead of fedmn (fedmn_correlation, local, fedavg,
fedprox, fedavg_plus, clustered_fl, pfedme, fedem), plain (FedMN without pre-training), a number of
clients (n20), or another partition (dirichlet0.4, classes4, iid).

FedMN's 150 rounds follow a pre-training with FedAvg: 145 rounds at rate 0.07 in the testbed, as in
the authors' code, and 50 rounds on digits and mnist. The other methods train for 200 rounds.
"""

from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.presets.vocabulary import apply_words
from fedjax_pfl.settings import configuration

TESTBED = ("cifar10", "cifar100", "emnist_byclass", "femnist")
# The testbed's rates, in its order of datasets.
RATES = {
    "local": (0.03, 0.01, 0.01, 0.01),
    "fedavg": (0.01, 0.01, 0.01, 0.03),
    "fedprox": (0.01, 0.01, 0.01, 0.05),
    "fedavg_plus": (0.001, 0.001, 0.01, 0.03),
    "clustered_fl": (0.003, 0.01, 0.01, 0.01),
    "pfedme": (0.001, 0.001, 0.01, 0.03),
    "fedem": (0.03, 0.01, 0.05, 0.03),
}
MU = (1.0, 0.1, 0.1, 0.05)
PENALTY = (1.0, 1.0, 1.0, 10.0)
ROUTED = ("fedmn", "fedmn_correlation")
DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"model": "small", "clients": 10},
    "mnist": {"model": "lenet", "clients": 20, "fraction": 0.1},
    "cifar10": {"model": "mobilenet", "clients": 80},
    "cifar100": {"model": "mobilenet", "clients": 100, "partition": "pachinko"},
    "emnist_byclass": {
        "model": "cnn",
        "clients": 100,
        "fraction": 0.1,
        "clusters": {"clusters": 62},
    },
    "femnist": {"model": "cnn", "clients": 539, "partition": "natural"},
}


def get_config(preset: str = "") -> ConfigDict:
    """Returns all settings of an experiment of the paper; FedMN on digits by default.

    `preset` has words joined with dashes, such as "cifar10-fedavg": dataset, method, partition.
    """
    config = configuration.default()
    config.update(algorithm="fedmn", partition="clusters", test_fraction=0.2, local_epochs=1)
    config.evaluate_after = False  # FedAvg+ is FedAvg after local training
    config.phases = ({"algorithm": "fedavg", "rounds": 50}, {})
    config.rounds = 150
    dataset = ["digits", *(word for word in preset.split("-") if word in DATASETS)][-1]
    config.update(DATASETS[dataset])
    if dataset in TESTBED:  # before the words, of which `plain` removes the phases
        config.phases = ({"algorithm": "fedavg", "rounds": 145, "learning_rate": 0.07}, {})
    config = apply_words(config, preset, {"plain": lambda match: {"phases": ()}})
    config.update({"model": DATASETS.get(config.dataset, {}).get("model", config.model)})
    if config.dataset in TESTBED:
        config.update(batch_size=128, momentum=0.9, weight_decay=5e-4, learning_rate=0.02)
        config.update(eval_every=10)
    else:
        config.update(learning_rate=0.05, momentum=0.9)
        config.fedmn.update(width=64, hidden=32, x_size=32, y_size=16, dropout=0.2)
        config.fedmn_correlation.update(width=64, hidden=32, size=32, dropout=0.2)
    if config.dataset in ("emnist_byclass", "femnist"):
        for name in ROUTED:
            config[name].layout = (3, 3, 3)
    if config.algorithm not in ROUTED:
        config.update(phases=(), rounds=200)
    if config.algorithm in RATES and config.dataset in TESTBED:
        column = TESTBED.index(config.dataset)
        config.update(learning_rate_drops=(0.5, 0.75), keep_optimizer=True)
        config.learning_rate = RATES[config.algorithm][column]
        config.fedprox.mu, config.pfedme.penalty = MU[column], PENALTY[column]
    return config
