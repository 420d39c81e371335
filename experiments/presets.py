"""Words that presets are made of: a dataset, a partition, a number of clients, a method."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl import config as configuration
from fedjax_pfl.errors import UsageError

# The network and the rate that a dataset is usually trained with here; a system's own config file
# says otherwise where its paper does.
DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"model": "small", "learning_rate": 0.05},
    "synthetic": {"model": "mlp"},
    "mnist": {"model": "lenet", "learning_rate": 0.005},
    "fashion_mnist": {"model": "lenet", "learning_rate": 0.005},
    "emnist": {"model": "lenet", "learning_rate": 0.005},
    "emnist_digits": {"model": "lenet", "learning_rate": 0.005},
    "emnist_letters": {"model": "lenet", "learning_rate": 0.005},
    "svhn_cropped": {"model": "lenet"},
    "cifar10": {"model": "lenet"},
    "cifar100": {"model": "lenet"},
    "omniglot": {"model": "lenet"},
    "femnist": {"model": "cnn"},
}


def _partition(name: str, **own: str) -> Callable[[ConfigDict, re.Match[str]], None]:
    def use(config: ConfigDict, match: re.Match[str]) -> None:
        config.partition = name
        for key, group in own.items():
            config[name][key] = type(config[name][key])(match[group])

    return use


def _clients(config: ConfigDict, match: re.Match[str]) -> None:
    config.clients = int(match["n"])


_PATTERNS: dict[str, Callable[[ConfigDict, re.Match[str]], None]] = {
    r"n(?P<n>\d+)": _clients,
    r"classes(?P<c>\d+)": _partition("classes", per_client="c"),
    r"dominant(?P<c>\d+)": _partition("dominant", dominant="c"),
    r"dirichlet(?P<a>[\d.]+)": _partition("dirichlet", alpha="a"),
    r"iid": _partition("iid"),
}


def apply(config: ConfigDict, preset: str, extra: Mapping[str, Callable[..., None]]) -> ConfigDict:
    """Change a configuration by the words of a preset, joined with dashes.

    The last dataset named is taken, so that a preset may begin with the one where none is named.

    Args:
      extra: a system's own words; each gets the configuration and the match of its pattern.
    """
    patterns = {**_PATTERNS, **extra}
    words = [w for w in preset.split("-") if w]
    for word in [w for w in words if w in DATASETS][-1:]:
        config.dataset = word  # before the others: they change the defaults that it brings
        config.update(DATASETS[word])
    for word in words:
        if word in DATASETS:
            continue
        if word in configuration.ALGORITHMS:
            config.algorithm = word
        else:
            matches = ((use, re.fullmatch(p, word)) for p, use in patterns.items())
            found = next(((use, m) for use, m in matches if m), None)
            if found is None:
                known = [*DATASETS, *configuration.ALGORITHMS, "n10", "classes4", "dominant2"]
                known += ["dirichlet0.5", "iid", *extra]
                raise UsageError(f"there is no preset {word!r}{configuration.nearest(word, known)}")
            found[0](config, found[1])
    return config
