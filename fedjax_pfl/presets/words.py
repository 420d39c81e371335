"""Words that presets are made of: a dataset, a partition, a number of clients, a method."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings import configuration

# The network and the rate that a dataset is usually trained with here; a system's own config file
# says otherwise where its paper does.
DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"model": "small", "learning_rate": 0.05},
    "synthetic": {"model": "mlp"},
    "mnist": {"model": "lenet", "learning_rate": 0.005},
    "fashion_mnist": {"model": "lenet", "learning_rate": 0.005},
    "emnist_byclass": {"model": "lenet", "learning_rate": 0.005},
    "emnist_digits": {"model": "lenet", "learning_rate": 0.005},
    "emnist_letters": {"model": "lenet", "learning_rate": 0.005},
    "svhn_cropped": {"model": "lenet"},
    "cifar10": {"model": "lenet"},
    "cifar100": {"model": "lenet"},
    "omniglot": {"model": "lenet"},
    "femnist": {"model": "cnn"},
    "iris": {"model": "mlp", "learning_rate": 0.05, "partition": "dirichlet", "clients": 5},
    "wine": {"model": "mlp", "learning_rate": 0.05, "partition": "dirichlet", "clients": 5},
    "breast_cancer": {"model": "mlp", "learning_rate": 0.05, "partition": "dirichlet"},
    "diabetes": {"model": "mlp", "learning_rate": 0.02, "partition": "iid"},
    "sensors": {
        "model": "cnn1d",
        "learning_rate": 0.1,
        "partition": "natural",
        "clients": 12,
        "split": "official",
    },
    "speeches": {"model": "lstm", "learning_rate": 1.0, "partition": "natural", "clients": 12},
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
    """Change a configuration by the words of a preset, joined with dashes; digits if it names none.

    Args:
      extra: a system's own words; each gets the configuration and the match of its pattern.
    """
    patterns = {**_PATTERNS, **extra}
    words = [w for w in preset.split("-") if w]
    # The dataset before the others: they change the defaults that it brings.
    config.dataset = ["digits", *(w for w in words if w in DATASETS)][-1]
    config.update(DATASETS[config.dataset])
    for word in words:
        if word in DATASETS:
            continue
        if word in configuration.ALGORITHMS:
            config.algorithm = word
        else:
            matches = ((use, re.fullmatch(p, word)) for p, use in patterns.items())
            found = next(((use, m) for use, m in matches if m), None)
            if found is None:
                known = [*DATASETS, *configuration.ALGORITHMS, *_examples(patterns, word)]
                whole = "-".join("{}" if w == word else w for w in words)
                hint = configuration.nearest(word, known, whole)
                raise UsageError(f"there is no preset {preset!r}: {word!r} is no word of one{hint}")
            found[0](config, found[1])
    return config


def _examples(patterns: Iterable[str], word: str) -> list[str]:
    """Words that patterns take, with the number that a word ends in."""
    number = re.search(r"[\d.]+$", word)
    filled = (re.sub(r"\(\?P<.*?\)", number[0] if number else "N", one) for one in patterns)
    return [example for pattern in filled for example in pattern.split("|")]
