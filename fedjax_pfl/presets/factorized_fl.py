"""Settings of Factorized-FL and of the methods that its paper compares with.

fedjax-pfl factorized_fl --config=factorized_fl:cifar10-noniid

Presets are words joined with dashes: a dataset (digits, mnist, cifar10, svhn_cropped, cifar100), a
partition (iid, noniid: Dir(0.5) over clients for each class, domains: five of CIFAR-100), permuted
labels, alpha or beta, or a method instead of Factorized-FL (local, fedavg, fedprox, clustered_fl,
per_fedavg, fedfomo, pfedpara, factorized_fl_moved, ...), a narrower ResNet9 (w16: 16 kernels in the
first layer), and a number of clients (n20). If labels are permuted, and between domains, the head
of every method stays with its client; that of factorized_fl always does.

Best rounds are chosen by accuracy after local training, as the authors' code reports it.
"""

import re
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets.vocabulary import Words, apply_words, require_word_of
from fedjax_pfl.settings import configuration

# τ, ε and the least number of candidates among 20 clients, as in the authors' code.
_MATCHING: dict[str, dict[str, Any]] = {
    "plain": {"tau": 0.0, "scale": 1.0, "minimum": 20},
    "permuted": {"tau": 0.0, "scale": 1.0, "minimum": 10},
    "domains": {"tau": 0.95, "scale": 20.0, "minimum": 4},
}


_METHODS = ("factorized_fl", "factorized_fl_moved")
_WORDS: Words = {
    "noniid": lambda match: {"partition": "dirichlet", "dirichlet": {"alpha": 0.5}},
    "permuted": lambda match: {"permute_labels": True},
    "domains": lambda match: {"partition": "domains", "permute_labels": True},
    "alpha|beta": lambda match: {
        method: {"share": {"alpha": "u", "beta": "all"}[match[0]]} for method in _METHODS
    },
    r"w(\d+)": lambda match: {"resnet9": {"width": int(match[1])}},
}


def get_config(preset: str = "permuted-noniid") -> ConfigDict:
    """Returns all settings of an experiment of the paper: a dataset, partition and method.

    `preset` has words joined with dashes, such as "cifar10-noniid-permuted"; without one, the
    dataset is digits and the method Factorized-FL beta.
    """
    config = configuration.default()
    config.update(algorithm="factorized_fl", partition="iid", clients=20, model="resnet9")
    config = apply_words(config, preset, _WORDS)
    require_word_of(preset, "alpha|beta", config.algorithm, _METHODS)
    small = config.dataset == "digits"
    config.update(split="shared", test_fraction=0.1, validation_fraction=0.1)
    config.update(local_epochs=5, batch_size=256, learning_rate=1e-3, momentum=0.9)
    config.update(weight_decay=1e-6, keep_optimizer=True, rounds=50, eval_every=5)
    config.validate_after = True
    config.augment = not small and config.dataset != "mnist"
    config.model = "small" if small else "resnet9"
    if small:
        if word := re.search(r"(?:^|-)(w\d+)(?:-|$)", preset):
            raise UsageError(
                f"there is no preset {preset!r}: {word[1]} narrows ResNet9, and digits have "
                "another network; leave it out or choose another dataset"
            )
        config.small.batch_norm = True
        config.update(clients=10, batch_size=16, learning_rate=0.01)
        if match := re.search(r"(?:^|-)n(\d+)(?:-|$)", preset):
            config.clients = int(match[1])
    kind = "domains" if config.partition == "domains" else "plain"
    kind = "permuted" if config.permute_labels and kind == "plain" else kind
    config.keep_head = kind != "plain" and config.algorithm != "factorized_fl"
    config.zero_head = kind != "plain" and config.algorithm == "factorized_fl_moved"
    matching = dict(_MATCHING[kind])
    matching["minimum"] = max(1, round(matching["minimum"] * config.clients / 20))
    config.factorized_fl.update(matching)
    config.factorized_fl_moved.update(matching)
    if kind == "domains":
        # Movements have cosines of 0.6 within a domain and of 0.1 to 0.3 between domains.
        config.factorized_fl_moved.scale = 5.0
    # As the paper's costs are counted: 50 uploads and 49 downloads, and 7.4 GB for pFedPara.
    config.count_initial_download = False
    config.pfedpara.gamma = 0.8
    # All clients are validated on the same examples, where local training may make a model worse.
    # No peer would then improve on a round's first model, from which every round would start again.
    config.fedfomo.reference = "last"
    if kind == "domains":
        config.rounds = 100
    return config
