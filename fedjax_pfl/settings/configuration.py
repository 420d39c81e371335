"""The one vocabulary of settings, their defaults, and what is wrong with a configuration.

Those of every run are rows in general.py. An algorithm's, a partition's, a model's and a
dataset's own settings are the keyword arguments of its factory, whose docstring says under `Args:`
what they mean; they appear in a sub-config of its name.
"""

import dataclasses
import difflib
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FrozenConfigDict, config_dict

from fedjax_pfl import algorithms, data, networks
from fedjax_pfl.core import optimizers, task
from fedjax_pfl.core.errors import MAX_LAYERS, UsageError
from fedjax_pfl.settings.general import ROWS, having
from fedjax_pfl.transforms import SERVER_OPTIMIZERS

ALGORITHMS: dict[str, Callable[..., Any]] = {
    name: method.factory for name, method in algorithms.METHODS.items()
}
PARTITIONS: dict[str, Callable[..., Any]] = data.PARTITIONS
MODELS: dict[str, Callable[..., Any]] = dict(networks.MODELS)
DATASETS: dict[str, Callable[..., Any]] = dict(data.SOURCES)
TASKS: dict[str, Callable[..., Any]] = {"auto": task.infer_task, **task.TASKS}


class Registry(NamedTuple):
    """What each name means, by the setting that chooses it."""

    algorithm: Mapping[str, Callable[..., Any]] = ALGORITHMS
    dataset: Mapping[str, Callable[..., Any]] = DATASETS
    partition: Mapping[str, Callable[..., Any]] = PARTITIONS
    model: Mapping[str, Callable[..., Any]] = MODELS
    optimizer: Mapping[str, Callable[..., Any]] = optimizers.OPTIMIZERS
    server_optimizer: Mapping[str, Callable[..., Any]] = SERVER_OPTIMIZERS
    task: Mapping[str, Callable[..., Any]] = TASKS


BUILTINS = Registry()  # the library's own components; custom.py adds a user's for one run
_GIVEN = {"outputs", "conv", "parent", "name", "data_dir"}  # set elsewhere than in a sub-config


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


def chosen(config: Mapping[str, Any], kind: str) -> str:
    """The word that a setting chooses by: of a dataset's name, what stands before its path."""
    return data.kind(config[kind]) if kind == "dataset" else config[kind]


def default(words: Registry = BUILTINS) -> ConfigDict:
    """Every setting with its default: FedAvg on the embedded digits."""
    config = ConfigDict()
    for name, row in ROWS.items():
        unset = row.default_value is None
        config[name] = config_dict.placeholder(row.default) if unset else row.default
    for table in words:
        for name, factory in table.items():
            if own := settings(factory):
                config[name] = ConfigDict(own)
    config.classes.update(per_client=4, examples=160)
    return config


def nearest(word: Any, words: Any, whole: str = "{}") -> str:
    """A hint at the word that was probably meant, as papers write it (LG-FedAvg) or not.

    Where none is near, all of them; the three nearest where there are too many to read.

    Args:
      whole: of which it is a part, such as "pfedla.{}".
    """
    small = {str(known).lower(): known for known in words}
    word = str(word).lower()  # which somebody may give as a number
    close = difflib.get_close_matches(word, small, 1, 0.5)
    if close:
        return f"; did you mean {whole.replace('{}', small[close[0]])}?"
    if len(small) <= _FEW_WORDS:
        return f"; there are {', '.join(sorted(words))}"
    first, second, third = (
        whole.replace("{}", small[one]) for one in difflib.get_close_matches(word, small, 3, 0.0)
    )
    return f"; the nearest of {len(small)} are {first}, {second} and {third}"


_FEW_WORDS = 25
# Names of settings in other libraries.
_CALLED_ELSEWHERE = {
    "lr": "learning_rate",
    "local_learning_rate": "learning_rate",
    "epochs": "local_epochs",
    "num_clients": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "method": "algorithm",
    "network": "model",
    "random_seed": "seed",
    "gpu": "devices",
}


def complete(given: Mapping[str, Any], words: Registry = BUILTINS) -> ConfigDict:
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
            elif not prefix and key in _CALLED_ELSEWHERE:
                hint = f"; did you mean {_CALLED_ELSEWHERE[key]}?"
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


def phases(config: ConfigDict, words: Registry = BUILTINS) -> list[ConfigDict]:
    """The configuration of each phase, in order: one where none are listed."""
    listed = list(config.phases) or [{}]
    resolved = []
    for number, changes in enumerate(listed):
        one = config.copy_and_resolve_references()
        one.phases = ()
        if not isinstance(changes, Mapping):
            raise UsageError(f"phases[{number}] must be a group of settings, such as rounds=10")
        for key in changes:
            can = having("per_phase")
            if key not in can and key not in {**words.algorithm, **words.model}:
                raise UsageError(f"a phase cannot change {key}{nearest(key, can)}")
        override(one, changes, f"phases[{number}].")
        resolved.append(one)
    return resolved


def groups(config: ConfigDict, words: Registry = BUILTINS) -> list[ConfigDict]:
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


def resolved(config: ConfigDict, words: Registry = BUILTINS) -> dict[str, Any]:
    """As plain data, with the sub-configs of what is used and no others."""
    plain = config.copy_and_resolve_references().to_dict()
    each = [g for one in phases(config, words) for g in groups(one, words)]
    used = {chosen(g, kind) for g in each for kind in words._fields}
    optional = {name for table in words for name in table} - used
    return {key: value for key, value in plain.items() if key not in optional}


_MOST_UNITS = 1_000_000  # of a layer of ours
_LARGEST = 2**31 - 1  # rounds, clients and seeds are 32 bits in compiled code


@dataclasses.dataclass(frozen=True)
class PhaseSpecification:
    """The settings of a part of a run, which have been found to be possible."""

    settings: ConfigDict
    groups: tuple[ConfigDict, ...]  # of each architecture; one where none are listed


@dataclasses.dataclass(frozen=True)
class Specification:
    """The settings of a run, which have been found to be possible, and of each of its phases."""

    settings: ConfigDict
    phases: tuple[PhaseSpecification, ...]
    words: Registry


def specify(config: ConfigDict, words: Registry = BUILTINS) -> Specification:
    """What a run is to be, from its settings, or UsageError for the first that cannot be.

    What builds from a specification checks no setting again.
    """
    like = default(words)
    each = []
    for number, one in enumerate(phases(config, words)):
        where = f"phases[{number}]." if len(config.phases) else ""
        _check_types(one, like, where)
        for kind, table in words._asdict().items():
            if (word := chosen(one, kind)) not in table:
                raise UsageError(f"there is no {kind} {word!r}{nearest(word, table)}")
        _check_rows(one, where)
        made = groups(one, words)
        for i, group in enumerate(made):
            inner = f"groups[{i}]." if one.groups else where
            _check_types(group, like, inner)
            _check_network(group, words, inner)
        _check_together(one, where)
        each.append(PhaseSpecification(_frozen(one), tuple(map(_frozen, made))))
    if (whole := sum(one.settings.rounds for one in each)) > _LARGEST:
        raise UsageError(f"all phases have {whole} rounds; together at most {_LARGEST} can be")
    return Specification(_frozen(config), tuple(each), words)


def _frozen(config: ConfigDict) -> ConfigDict:
    """Without the lists of phases and groups, which a specification has in their place."""
    plain = config.copy_and_resolve_references()
    plain.update(phases=(), groups=())
    return FrozenConfigDict(plain)


def _check_rows(one: ConfigDict, where: str) -> None:
    """Each setting by what its row says."""
    for name, row in ROWS.items():
        value = one[name]
        if wanted := row.violation(value):
            raise UsageError(f"{where}{name} is {value}; it must be {wanted}")
        if row.choices and value not in row.choices:
            raise UsageError(f"{where}{name} is {value!r}{nearest(value, row.choices)}")


def _check_together(one: ConfigDict, where: str) -> None:
    """What settings ask for together; those of the whole run are the same in each phase."""
    if one.local_epochs is not None and one.local_steps is not None:
        raise UsageError(f"{where}local_epochs and local_steps are both set; choose one")
    if one.validate_after and not one.evaluate_after:
        raise UsageError(f"{where}validate_after needs evaluate_after; set both or neither")
    if not all(isinstance(d, (int, float)) and 0 < d < 1 for d in one.learning_rate_drops):
        raise UsageError(f"{where}learning_rate_drops must be shares between 0 and 1")
    active = one.clients - one.held_out
    if active < 1:
        raise UsageError(
            f"held_out is {one.held_out} of {one.clients} clients; at least one must take part"
        )
    if one.participants == "held_out" and not one.held_out:
        raise UsageError(
            f"{where}participants is held_out, and held_out is 0; hold some clients out"
        )
    there = active if one.participants == "active" else one.held_out
    for name in ("clients_per_round", "evaluate_clients"):
        if one[name] is not None and one[name] > there:
            raise UsageError(
                f"{where}{name} is {one[name]}, and there are {there} clients; choose 1 to {there}"
            )
    if one.test_fraction + one.validation_fraction >= 1:
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


def _check_network(one: ConfigDict, words: Registry, where: str) -> None:
    """A network of ours: of what it has a number of it has one at least; dropout is a share."""
    if words.model[one.model] is not MODELS.get(one.model):
        return
    for key, value in one.get(one.model, ConfigDict()).items():
        for number in value if isinstance(value, tuple) else (value,):
            most = MAX_LAYERS if key in ("blocks", "kernel_size") else _MOST_UNITS
            if type(number) is int and not 1 <= number <= most:
                wanted = f"from 1 to {most:,}"
            elif key == "dropout" and not 0 <= number < 1:
                wanted = "at least 0 and below 1"
            elif type(number) is float and key != "dropout" and not 0 < number <= MAX_LAYERS:
                wanted = f"above 0 and at most {MAX_LAYERS:,}"
            else:
                continue
            raise UsageError(f"{where}{one.model}.{key} is {value}; it must be {wanted}")


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> list[str]:
    """The settings in which two resolved configurations differ and that a resumption keeps.

    A setting that there was not yet when the old run began is at its default there.
    """
    found, known = [], default().to_dict() if known is None else known
    for key in sorted({*old, *new} - {*having("resumable")}):
        usual = known.get(key)
        usual = list(usual) if isinstance(usual, tuple) else usual
        there, here = old.get(key, usual), new.get(key)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            inner = usual if isinstance(usual, Mapping) else {}
            found += [f"{key}.{line}" for line in differences(there, here, inner)]
        elif there != here:
            parts = _differing_lengths(there or (), here or ()) if key == "phases" else []
            found += parts or [f"{key} ({there!r} there, {here!r} here)"]
    return found


def _differing_lengths(old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    """The phases whose rounds differ, where nothing else of them does."""
    if list(map(_without_length, old)) != list(map(_without_length, new)):
        return []
    each = enumerate(
        (one.get("rounds"), other.get("rounds")) for one, other in zip(old, new, strict=True)
    )
    return [f"phases[{i}].rounds ({a} there, {b} here)" for i, (a, b) in each if a != b]


def longer(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether all that a resumption keeps is the same, but for more rounds at the end."""
    before, after = _lengths(old), _lengths(new)
    return (
        len(before) == len(after)
        and before[:-1] == after[:-1]
        and before[-1] < after[-1]
        and not differences(_without_lengths(old), _without_lengths(new))
    )


def _lengths(plain: Mapping[str, Any]) -> list[int]:
    """The rounds of each phase of a resolved configuration."""
    return [one.get("rounds", plain["rounds"]) for one in plain.get("phases") or [{}]]


def _without_lengths(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain, "rounds": 1, "phases": [_without_length(p) for p in plain.get("phases") or ()]}


def _without_length(phase: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in phase.items() if key != "rounds"}
