"""pFedHN, pFedHN-PC and the methods that their paper compares with, in its settings.

fedjax-pfl pfedhn --config=pfedhn:cifar10-n50

Presets are words joined with dashes:

- a dataset (digits, mnist, cifar10, cifar100, omniglot);
- a number of clients (n10, n50, n100);
- a method (pfedhn, pfedhn_pc, local, fedavg, fedper, lg_fedavg, per_fedavg, pfedme);
- clients per round of a hypernetwork method (k5: five, in a fifth of the rounds);
- communication steps (steps100, instead of the paper's 5,000 or of 500 on digits);
- sizes (with digits, cifar10 or cifar100: 75 clients in three groups with 8, 16 and 32 kernels in
  the first layer).

A communication step is one round: of one client for a hypernetwork method, of five clients for the
others, which have a fifth of the rounds on digits. Where the paper is silent, other methods take as
many local steps as pFedHN's clients, and all but pFedMe have the same local learning rate. The
paper chose learning rates from {0.1, 0.05, 0.01, 0.005} and personal ones from {0.05, 0.01, 0.005,
0.001}, and does not say which it chose.
"""

import re
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets.vocabulary import Words, apply_words
from fedjax_pfl.settings import configuration

HYPERNETWORKS = ("pfedhn", "pfedhn_pc")
# The first three datasets have an official test set.
_OFFICIAL = {"split": "official", "validation_examples": 10_000}
DATASETS: dict[str, dict[str, Any]] = {
    "digits": {
        "validation_fraction": 0.15,
        "test_fraction": 0.25,
        # At the default rate, 0.05, all ReLUs of a layer die on this small network, and the
        # hypernetwork generates one body for all clients.
        "pfedhn_pc": {"rate": 1e-2},
    },
    "mnist": {
        **_OFFICIAL,
        "model": "mlp",  # one hidden layer, as in appendix C.1, and so has the hypernetwork
        "pfedhn": {"depth": 1},
        "pfedhn_pc": {"depth": 1},
    },
    "cifar10": _OFFICIAL,
    "cifar100": {**_OFFICIAL, "shares": {"per_client": 10}},
    "omniglot": {  # one alphabet each; four convolutions and two fully connected layers
        "partition": "natural",
        "validation_fraction": 0.15,
        "test_fraction": 0.15,
        "lenet": {
            "kernels": (16, 32, 64, 64),
            "kernel_size": 3,
            "padding": "SAME",
            "dense": (120,),
        },
    },
}
_SIZED = ("digits", "cifar10", "cifar100")  # datasets with presets of three network sizes
# Settings of single methods.
METHODS: dict[str, dict[str, Any]] = {
    "local": {"clients_per_round": None},
    # 60 local steps: 20 batches with K = 3 steps on each. Its steps have no momentum, and at the
    # other methods' rate it hardly moves. Of the paper's rates this one has the best validation
    # accuracy with ten clients of CIFAR-10 after 20 rounds.
    "pfedme": {
        "local_steps": 20,
        "learning_rate": 0.1,
        "momentum": 0.0,
        "pfedme": {"inner_steps": 3},
    },
    "per_fedavg": {"momentum": 0.0},
}


_WORDS: Words = {
    r"k([1-9]\d*)": lambda match: {"clients_per_round": int(match[1])},
    r"steps([1-9]\d*)": lambda match: {"rounds": int(match[1])},
    "sizes": lambda match: {},
}


def get_config(preset: str = "") -> ConfigDict:
    """Returns all settings of an experiment of the paper; pFedHN on digits by default.

    `preset` has words joined with dashes, such as "cifar10-n50-fedavg": dataset, clients, method.
    """
    config = configuration.default()
    config.update(algorithm="pfedhn", partition="shares", evaluate_after=False, rounds=0)
    config = apply_words(config, preset, _WORDS)
    is_sized = "sizes" in preset.split("-")
    if is_sized and config.dataset not in _SIZED:
        raise UsageError(
            f"there is no preset {preset!r}: sizes needs one of the datasets {', '.join(_SIZED)}"
        )
    if config.dataset == "omniglot" and config.partition != "shares":
        raise UsageError(
            f"there is no preset {preset!r}: a client of omniglot has an alphabet; leave "
            f"{config.partition} out"
        )
    if config.algorithm == "local" and config.clients_per_round:
        raise UsageError(
            f"there is no preset {preset!r}: local trains all clients; leave "
            f"k{config.clients_per_round} out"
        )
    small = config.dataset == "digits"
    steps, cohort = config.rounds or (500 if small else 5000), config.clients_per_round
    if not re.search(r"(^|-)n\d+(-|$)", preset):
        config.clients = 75 if is_sized else 10 if small else 50
    config.update(local_steps=50, batch_size=64, learning_rate=5e-3, momentum=0.9)
    config.update(weight_decay=5e-5, clip_norm=50.0)
    config.update(DATASETS.get(config.dataset, {}))
    if is_sized:
        config.groups = tuple({config.model: {"kernels": (k, 2 * k)}} for k in (8, 16, 32))

    if config.algorithm in HYPERNETWORKS:
        cohort = cohort or 1
        rounds = steps // cohort
    else:
        cohort = cohort or (15 if is_sized else 5)  # five of each size
        rounds = steps // 5 if small else steps
    config.update(clients_per_round=cohort, rounds=max(1, rounds))
    if config.algorithm == "local":
        config.rounds = max(1, steps // 125)  # 2,000 steps on each client
    if config.algorithm == "lg_fedavg":
        config.phases = ({"algorithm": "fedavg"}, {"rounds": max(1, rounds // 5)})
    config.eval_every = max(1, config.rounds // (10 if small else 100))
    config.update(METHODS.get(config.algorithm, {}))
    return config
