"""The words that presets share: datasets, partitions, numbers of clients and methods."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings import configuration

# Default network, learning rate and partition of each dataset. A system's presets override them
# with the settings of its paper.
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


# A regular expression of a word, and a function from its match to the settings that it changes.
Words = Mapping[str, Callable[[re.Match[str]], Mapping[str, Any]]]

_WORDS: Words = {
    r"n(\d+)": lambda match: {"clients": int(match[1])},
    r"classes(\d+)": lambda match: _partition("classes", per_client=int(match[1])),
    r"dominant(\d+)": lambda match: _partition("dominant", dominant=int(match[1])),
    r"dirichlet(\d*\.?\d+)": lambda match: _partition("dirichlet", alpha=float(match[1])),
    r"iid": lambda match: _partition("iid"),
}


def _partition(name: str, **settings: float) -> dict[str, Any]:
    """Returns nested settings that select the partition `name` and set its settings."""
    return {"partition": name, name: settings} if settings else {"partition": name}


def apply_words(config: ConfigDict, preset: str, own_words: Words) -> ConfigDict:
    """Changes a configuration in place by the words of a preset, and returns it.

    Words, joined with dashes, are a dataset (without one: digits), a method, and words that match a
    pattern, such as "n20" for 20 clients. Raises UsageError for another word, and for words that
    contradict each other. `own_words` are more patterns (regular expressions of a whole word), each
    with a function from the match to the settings to change, in nested dicts.
    """
    patterns = {**_WORDS, **own_words}
    preset_words = [word for word in preset.split("-") if word]
    # The dataset first: the other words change the defaults that it sets.
    config.dataset = ["digits", *(word for word in preset_words if word in DATASETS)][-1]
    config.update(DATASETS[config.dataset])
    deciding: dict[str, tuple[str, Any]] = {}  # by setting: the first word that changes it, value
    setting_of_word = {
        **dict.fromkeys(configuration.ALGORITHMS, "algorithm"),
        **dict.fromkeys(DATASETS, "dataset"),
    }
    for word in preset_words:
        matches: list[Mapping[str, Any]] = (
            [{setting_of_word[word]: word}] if word in setting_of_word else []
        )
        matches += [changes(m) for p, changes in patterns.items() if (m := re.fullmatch(p, word))]
        if not matches:
            names = [*setting_of_word, *_examples(patterns, word)]
            template = "-".join("{}" if w == word else w for w in preset_words)
            hint = configuration.suggestion(word, names, template)
            raise UsageError(f"there is no preset {preset!r}: {word!r} is no word of one{hint}")
        for name, value in matches[0].items():
            first, first_value = deciding.setdefault(name, (word, value))
            if value != first_value:
                raise UsageError(
                    f"there is no preset {preset!r}: {first!r} and {word!r} contradict each other; "
                    "leave one out"
                )
        config.update(matches[0])
    return config


def images_of_digits(clients: int) -> int:
    """Returns how many of the 1,797 digits a client gets; 160 with at most ten clients."""
    return max(1, 1600 // max(clients, 10))


def require_word_of(preset: str, pattern: str, algorithm: str, methods: Collection[str]) -> None:
    """Raises UsageError if a preset has a word that only some methods use, and another method.

    `pattern` is a regular expression of the word, `algorithm` the preset's method, and `methods`
    are those that use the word.
    """
    for word in preset.split("-"):
        if re.fullmatch(pattern, word) and algorithm not in methods:
            raise UsageError(
                f"there is no preset {preset!r}: {word} is for {' and '.join(methods)}, and the "
                f"method is {algorithm}; leave one out"
            )


def _examples(patterns: Iterable[str], word: str) -> list[str]:
    """Returns words that match regular expressions, with the number that `word` ends in, or N.

    For the pattern "n(\\d+)" and the word "k5" this is "n5". A hint lists them.
    """
    number = re.search(r"[\d.]+$", word)
    filled = (re.sub(r"\(.*?\)", number[0] if number else "N", p) for p in patterns)
    return [example for pattern in filled for example in pattern.split("|")]
