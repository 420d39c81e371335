"""Factorized-FL and the methods that its paper compares with, in its settings.

python -m experiments.factorized_fl --config=experiments/configs/factorized_fl.py:cifar10-noniid

Presets are words joined with dashes: a dataset (digits, mnist, cifar10, svhn_cropped, cifar100), a
partition (iid, noniid: Dir(.5) over clients for each class, domains: five of CIFAR-100), permuted
labels, alpha or beta, or another method in their place (local, fedavg, fedprox, clustered_fl,
per_fedavg, fedfomo, pfedpara, ...), a smaller ResNet9 (w16: sixteen kernels in the first layer), a
number of clients (n20). Where labels are permuted, and between domains, heads stay at home; those
of Factorized-FL start at zero. With the word published it is as in the paper: heads that are drawn,
Xavier's u and v and μ = 0 at first, cosines of v itself, and a penalty on μ with a gradient.

The paper reports accuracy after local training, and that is what chooses a best round.
"""

import re
from typing import Any

from ml_collections import ConfigDict

from experiments.papers import preset_words
from fedjax_pfl.config import configuration

# τ, ε and the least number of candidates among 20 clients, for cosines of v itself.
_MATCHING: dict[str, dict[str, Any]] = {
    "plain": {"tau": 0.0, "scale": 1.0, "minimum": 20},
    "permuted": {"tau": 0.0, "scale": 1.0, "minimum": 10},
    "domains": {"tau": 0.95, "scale": 20.0, "minimum": 4},
}

_PUBLISHED = {"start": "factors", "compare": "v", "penalty": 5e-4}


def _noniid(config: ConfigDict, match: re.Match[str]) -> None:
    config.partition = "dirichlet"
    config.dirichlet.alpha = 0.5


def _permuted(config: ConfigDict, match: re.Match[str]) -> None:
    config.permute_labels = True


def _domains(config: ConfigDict, match: re.Match[str]) -> None:
    config.update(partition="domains", permute_labels=True)


def _published(config: ConfigDict, match: re.Match[str]) -> None:
    config.factorized_fl.update(_PUBLISHED)


def _shared(config: ConfigDict, match: re.Match[str]) -> None:
    config.factorized_fl.share = {"alpha": "u", "beta": "all"}[match[0]]


def _width(config: ConfigDict, match: re.Match[str]) -> None:
    config.resnet9.width = int(match["w"])


def get_config(preset: str = "permuted-noniid") -> ConfigDict:
    """A cell of the paper's table; beta on the embedded digits where nothing is said."""
    config = configuration.default()
    config.update(algorithm="factorized_fl", partition="iid", clients=20, model="resnet9")
    words = {
        "noniid": _noniid,
        "permuted": _permuted,
        "domains": _domains,
        "alpha|beta": _shared,
        "published": _published,
        r"w(?P<w>\d+)": _width,
    }
    config = preset_words.apply(config, preset, words)
    small = config.dataset == "digits"
    config.update(split="shared", test_fraction=0.1, validation_fraction=0.1)
    config.update(local_epochs=5, batch_size=256, learning_rate=1e-3, momentum=0.9)
    config.update(weight_decay=1e-6, keep_optimizer=True, rounds=50, eval_every=5)
    config.validate_after = True  # a mixed model meets its own BatchNorm's statistics only there
    config.augment = not small and config.dataset != "mnist"
    config.model = "small" if small else "resnet9"
    if small:
        config.small.batch_norm = True
        config.update(clients=10, batch_size=16, learning_rate=0.01)
        if match := re.search(r"(?:^|-)n(\d+)(?:-|$)", preset):
            config.clients = int(match[1])
    kind = "domains" if config.partition == "domains" else "plain"
    kind = "permuted" if config.permute_labels and kind == "plain" else kind
    config.keep_head = kind != "plain"
    config.factorized_fl.update(_MATCHING[kind])
    if config.factorized_fl.compare == "moved" and kind == "domains":
        # Cosines of what has moved are some .6 within a domain and .1 to .3 between domains.
        config.factorized_fl.scale = 5.0
    config.zero_head = (
        config.keep_head
        and config.algorithm == "factorized_fl"
        and config.factorized_fl.start == "plain"
    )
    least = _MATCHING[kind]["minimum"] * config.clients / 20
    config.factorized_fl.minimum = max(1, round(least))
    # Pruning and bills as in the paper: of μ what is not evaluated is not billed; 50 uploads and 49
    # downloads, and a pFedPara of 7.4 GB.
    config.factorized_fl.pruned = "evaluation"
    config.count_initial_download = False
    config.pfedpara.gamma = 0.8
    # All are validated on one part of the data, where training on one's own may make a model worse:
    # beside what that began with no model would be better, and each round would begin there again.
    config.fedfomo.reference = "last"
    if kind == "domains":
        config.rounds = 100
    return config
