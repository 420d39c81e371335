"""The one vocabulary of settings, their defaults, and what is wrong with a configuration.

Those of every run are in general.py. An algorithm's, a partition's, a model's and a dataset's own
settings are the keyword arguments of its factory, whose docstring says under `Args:` what they
mean; they appear in a sub-config of its name.
"""

import dataclasses
import difflib
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict

from fedjax_pfl import algorithms, data, networks
from fedjax_pfl.config.settings import GENERAL
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks.lowerings.conv import lowering

ALGORITHMS: dict[str, Callable[..., Any]] = {
    name: getattr(algorithms, name) for name in algorithms.__all__
}
PARTITIONS: dict[str, Callable[..., Any]] = data.PARTITIONS
MODELS: dict[str, Callable[..., Any]] = dict(networks.MODELS)
DATASETS: dict[str, Callable[..., Any]] = dict(data.SOURCES)


class Words(NamedTuple):
    """What each name means, by the setting that chooses it."""

    algorithm: Mapping[str, Callable[..., Any]] = ALGORITHMS
    dataset: Mapping[str, Callable[..., Any]] = DATASETS
    partition: Mapping[str, Callable[..., Any]] = PARTITIONS
    model: Mapping[str, Callable[..., Any]] = MODELS


OURS = Words()  # what is part of the library; own.py adds what a caller brings for one run
_GIVEN = {"outputs", "conv", "parent", "name", "data_dir"}  # set elsewhere than in a sub-config

# Settings of one phase; the others hold for all of a run.
PHASE_KEYS = frozenset(
    {
        "algorithm",
        "model",
        "rounds",
        "participants",
        "clients_per_round",
        "local_epochs",
        "local_steps",
        "batch_size",
        "drop_last",
        "learning_rate",
        "learning_rate_drops",
        "momentum",
        "keep_momentum",
        "weight_decay",
        "clip_norm",
        "keep_head",
    }
)
PARTICIPANTS = ("active", "held_out")
# What may differ between a run and its resumption: where data lie, how work is laid out, what else
# is written.
NEUTRAL_KEYS = frozenset(
    {
        "data_dir",
        "checkpoint_every",
        "chunk",
        "conv",
        "devices",
        "measure",
        "memory_gb",
        "tensorboard",
    }
)


def settings(factory: Callable[..., Any]) -> dict[str, Any]:
    """A factory's own settings with their defaults; None becomes an empty place of its type."""
    if dataclasses.is_dataclass(factory):
        found = {f.name: f.default for f in dataclasses.fields(factory) if f.name not in _GIVEN}
    else:
        found = {
            name: p.default
            for name, p in inspect.signature(factory).parameters.items()
            if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and name not in _GIVEN
        }
    hints = typing.get_type_hints(factory)
    return {
        name: config_dict.placeholder(_inner(hints[name])) if value is None else value
        for name, value in found.items()
    }


def meanings(factory: Callable[..., Any]) -> dict[str, str]:
    """What its own settings mean, from `Args:` in its docstring and in those of what it extends."""
    found: dict[str, str] = {}
    for one in reversed(getattr(factory, "__mro__", (factory,))):
        told = inspect.cleandoc(one.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        for names, said in re.findall(r"^  (\w+(?:, \w+)*): (.*(?:\n   .*)*)", told, re.M):
            meaning = " ".join(said.split()).removesuffix(".")
            found |= dict.fromkeys(names.split(", "), meaning)
    return found


def _inner(hint: Any) -> type:
    return next(t for t in typing.get_args(hint) if t is not type(None))


def default(words: Words = OURS) -> ConfigDict:
    """Every setting with its default: FedAvg on the embedded digits."""
    config = ConfigDict()
    for group in GENERAL.values():
        for name, (usual, _) in group.items():
            unset = isinstance(usual, type)
            config[name] = config_dict.placeholder(usual) if unset else usual
    for table in words:
        for name, factory in table.items():
            if own := settings(factory):
                config[name] = ConfigDict(own)
    config.classes.update(per_client=4, examples=160)
    return config


def nearest(word: str, words: Any, whole: str = "{}") -> str:
    """A hint at the word that was probably meant, as papers write it (LG-FedAvg) or not.

    Args:
      whole: of which it is a part, such as "pfedla.{}".
    """
    small = {str(known).lower(): known for known in words}
    close = difflib.get_close_matches(word.lower(), small, 1, 0.5)
    if close:
        return f"; did you mean {whole.replace('{}', small[close[0]])}?"
    return f"; there are {', '.join(sorted(words))}"


def complete(given: Mapping[str, Any], words: Words = OURS) -> ConfigDict:
    """The defaults with what is given in their place; an unknown key is an error."""
    config = default(words)
    override(config, given)
    return config


def override(config: ConfigDict, given: Mapping[str, Any], prefix: str = "") -> None:
    """Change settings in place; an unknown key, or a value of another type, is an error."""
    for key, value in given.items():
        if key not in config:
            group, _, last = str(key).partition(".")
            if isinstance(config.get(group), ConfigDict):  # as it is called everywhere else
                hint = f"; write {{{group!r}: {{{last!r}: {value!r}}}}}"
            else:
                hint = nearest(key, config.keys(), f"{prefix}{{}}")
            raise UsageError(f"there is no setting {prefix}{key}{hint}")
        if isinstance(config[key], ConfigDict):
            if not isinstance(value, Mapping):
                raise UsageError(
                    f"{prefix}{key} is a group of settings; give {prefix}{key}.NAME, in Python "
                    f"{{{key!r}: {{NAME: VALUE}}}}"
                )
            override(config[key], value, f"{prefix}{key}.")
            continue
        wanted = config.get_type(key)
        try:
            if isinstance(value, bool) and wanted is not bool:  # which Python takes for a number
                raise TypeError
            config[key] = value
        except (TypeError, ValueError):
            raise UsageError(
                f"{prefix}{key} is {value!r}; it must be of type {wanted.__name__}"
            ) from None


def phases(config: ConfigDict, words: Words = OURS) -> list[ConfigDict]:
    """The configuration of each phase, in order: one where none are listed."""
    listed = list(config.phases) or [{}]
    resolved = []
    for number, changes in enumerate(listed):
        one = config.copy_and_resolve_references()
        one.phases = ()
        if not isinstance(changes, Mapping):
            raise UsageError(f"phases[{number}] must be a group of settings, such as rounds=10")
        for key in changes:
            if key not in PHASE_KEYS and key not in {**words.algorithm, **words.model}:
                raise UsageError(f"a phase cannot change {key}{nearest(key, PHASE_KEYS)}")
        override(one, changes, f"phases[{number}].")
        resolved.append(one)
    return resolved


def groups(config: ConfigDict, words: Words = OURS) -> list[ConfigDict]:
    """The configuration of each group of architectures: one where none are listed."""
    made = []
    for number, changes in enumerate(config.groups or [{}]):
        if not isinstance(changes, Mapping) or not set(changes) <= {"model", *words.model}:
            raise UsageError(
                f"groups[{number}] must be settings of a model, such as model='lenet' or "
                "lenet={'kernels': (8, 16)}"
            )
        one = config.copy_and_resolve_references()
        override(one, changes, f"groups[{number}].")
        if one.model not in words.model:
            raise UsageError(f"there is no model {one.model!r}{nearest(one.model, words.model)}")
        made.append(one)
    return made


def resolved(config: ConfigDict, words: Words = OURS) -> dict[str, Any]:
    """As plain data, with the sub-configs of what is used and no others."""
    plain = config.copy_and_resolve_references().to_dict()
    each = [g for one in phases(config, words) for g in groups(one, words)]
    used = {g[kind] for g in each for kind in words._fields}
    optional = {name for table in words for name in table} - used
    return {key: value for key, value in plain.items() if key not in optional}


_AT_LEAST = {  # smallest value that makes sense
    "clients": 1, "rounds": 1, "eval_every": 1, "batch_size": 1, "clients_per_round": 1,
    "local_epochs": 1, "local_steps": 1, "checkpoint_every": 1, "chunk": 1, "devices": 1,
    "validation_examples": 1, "held_out": 0, "seed": 0, "seeds": 1, "partition_seed": 0,
    "momentum": 0.0, "weight_decay": 0.0,
    "upload_bits": 2, "dropout": 0.0, "test_fraction": 0.0, "validation_fraction": 0.0,
}  # fmt: skip
_AT_MOST = {"upload_bits": 16, "seeds": 1000}
_LARGEST = 2**31 - 1  # rounds, clients and seeds are 32 bits in compiled code
_POSITIVE = (
    "memory_gb",
    "learning_rate",
    "clip_norm",
    "max_update_norm",
    "fraction",
    "upload_top_k",
)
_BELOW_ONE = ("momentum", "dropout", "test_fraction", "validation_fraction")


def check(config: ConfigDict, words: Words = OURS) -> None:
    """Raise UsageError for the first setting that cannot be."""
    like = default(words)
    lowering(config.conv)
    for number, one in enumerate(phases(config, words)):
        where = f"phases[{number}]." if len(config.phases) else ""
        _check_types(one, like, where)
        for kind, table in words._asdict().items():
            if one[kind] not in table:
                raise UsageError(f"there is no {kind} {one[kind]!r}{nearest(one[kind], table)}")
        for key, value in one.items():
            if value is not None and key in _AT_LEAST and value < _AT_LEAST[key]:
                raise UsageError(f"{where}{key} is {value}; it must be at least {_AT_LEAST[key]}")
            if value is not None and key in _AT_MOST and value > _AT_MOST[key]:
                raise UsageError(f"{where}{key} is {value}; it must be at most {_AT_MOST[key]}")
            if value is not None and key in _POSITIVE and value <= 0:
                raise UsageError(f"{where}{key} is {value}; it must be above 0")
            if key in _BELOW_ONE and value >= 1:
                raise UsageError(f"{where}{key} is {value}; it must be below 1")
        if one.local_epochs is not None and one.local_steps is not None:
            raise UsageError(f"{where}local_epochs and local_steps are both set; choose one")
        if one.validate_after and not one.evaluate_after:
            raise UsageError(f"{where}validate_after needs evaluate_after; set both or neither")
        if not all(isinstance(d, (int, float)) and 0 < d < 1 for d in one.learning_rate_drops):
            raise UsageError(f"{where}learning_rate_drops must be shares between 0 and 1")
        for i, group in enumerate(groups(one, words)):
            _check_types(group, like, f"groups[{i}]." if one.groups else where)
        active = config.clients - config.held_out
        if active < 1:
            raise UsageError(f"held_out is {config.held_out} of {config.clients} clients; "
                             "at least one must take part")  # fmt: skip
        if one.participants not in PARTICIPANTS:
            hint = nearest(one.participants, PARTICIPANTS)
            raise UsageError(f"{where}participants is {one.participants!r}{hint}")
        if one.participants == "held_out" and not config.held_out:
            raise UsageError(f"{where}participants is held_out, and held_out is 0; "
                             "hold some clients out")  # fmt: skip
        there = active if one.participants == "active" else config.held_out
        if one.clients_per_round is not None and one.clients_per_round > there:
            raise UsageError(
                f"{where}clients_per_round is {one.clients_per_round}, and there are {there} "
                f"clients; choose 1 to {there}"
            )
    if (whole := sum(one.rounds for one in phases(config, words))) > _LARGEST:
        raise UsageError(f"all phases have {whole} rounds; together at most {_LARGEST} can be")
    if config.fraction > 1:
        raise UsageError(f"fraction is {config.fraction}; it must be at most 1")
    if config.upload_top_k is not None and config.upload_top_k > 1:
        raise UsageError(f"upload_top_k is {config.upload_top_k}; it is a share, at most 1")
    if config.test_fraction + config.validation_fraction >= 1:
        raise UsageError("test_fraction and validation_fraction leave nothing to train on")


def _check_types(config: ConfigDict, like: ConfigDict, where: str) -> None:
    """What a ConfigDict lets pass: None, NaN and other items in place of the default's."""
    for key, wanted in like.items():
        value, kind = config[key], like.get_type(key)
        if isinstance(wanted, ConfigDict):
            _check_types(value, wanted, f"{where}{key}.")
            continue
        if value is None and wanted is not None:
            raise UsageError(f"{where}{key} is {value!r}; it must be of type {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{where}{key} is {value}; it must be a finite number")
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(n, int) and abs(n) > _LARGEST for n in numbers):
            raise UsageError(f"{where}{key} is {value}; it must be at most {_LARGEST}")
        if isinstance(wanted, tuple) and wanted and {type(v) for v in value} - {type(wanted[0])}:
            raise UsageError(f"{where}{key} is {value!r}; it must be numbers as in {wanted!r}")


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> list[str]:
    """The settings in which two resolved configurations differ and that a resumption keeps.

    A setting that there was not yet when the old run began is at its default there.
    """
    found, known = [], default().to_dict() if known is None else known
    for key in sorted({*old, *new} - NEUTRAL_KEYS):
        usual = known.get(key)
        usual = list(usual) if isinstance(usual, tuple) else usual
        there, here = old.get(key, usual), new.get(key)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            inner = usual if isinstance(usual, Mapping) else {}
            found += [f"{key}.{line}" for line in differences(there, here, inner)]
        elif there != here:
            found.append(f"{key} ({there!r} there, {here!r} here)")
    return found
