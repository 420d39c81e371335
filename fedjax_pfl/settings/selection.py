"""Settings of what is not selected: they would count for nothing, and are refused."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.settings.configuration import BUILTINS, Registry, chosen, groups, phases
from fedjax_pfl.settings.general import ROWS


def check_given(
    given: Mapping[str, Any], configs: Sequence[ConfigDict], words: Registry = BUILTINS
) -> None:
    """Raises UsageError for a setting that was given and that none of the configurations can read.

    A setting of a method, network, dataset or partition that is not selected is refused at its
    default too, one that counts with another setting only where it differs from its default: a
    run's whole configuration can be given again. A preset may bring settings of what is not
    selected; what somebody gives beside it is checked.

    Args:
      given: what somebody has written, nested as in Python.
      configs: what it has led to: one, or one for each method that is tuned.
    """
    each = [one for config in configs for one in phases(config, words)]
    _check(given, [g for one in each for g in groups(one, words)], "", words)
    for config in configs:
        for number, one in enumerate(phases(config, words)):
            listed = config.phases[number] if config.phases else {}
            _check(listed, groups(one, words), f"phases[{number}].", words)
        for number, changes in enumerate(config.groups):
            own = [groups(one, words)[number] for one in phases(config, words)]
            _check(changes, own, f"groups[{number}].", words)


def _check(
    given: Mapping[str, Any], readers: Sequence[ConfigDict], where: str, words: Registry
) -> None:
    for name, values in given.items():
        if name in ROWS:
            _check_counts(name, values, readers, where)
        kinds = [kind for kind, table in words._asdict().items() if name in table]
        if not kinds or not isinstance(values, Mapping):
            continue
        (kind,) = kinds
        found = dict.fromkeys(chosen(one, kind) for one in readers)
        for key in values:
            if name not in found:
                raise UsageError(
                    f"{where}{name}.{key} counts with {kind}={name} only, and {kind} is "
                    f"{' or '.join(found)}; set {where}{kind} to {name}, or leave "
                    f"{where}{name}.{key} out"
                )


def _check_counts(name: str, value: Any, readers: Sequence[ConfigDict], where: str) -> None:
    row = ROWS[name]
    if _plain(value) == _plain(row.default_value) or any(row.is_used(one.get) for one in readers):
        return
    other, choices = row.used_with or ("", ())
    now = " or ".join(dict.fromkeys(str(one[other]) for one in readers))
    raise UsageError(
        f"{where}{name} counts with {other}={' or '.join(choices)} only, and {other} is {now}; "
        f"change {where}{other}, or leave {where}{name} out"
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def check_owners(dataset: Dataset | None, configs: Iterable[ConfigDict]) -> None:
    """UsageError where somebody's examples have owners whom no partition asks for."""
    partitions = dict.fromkeys(one.partition for one in configs)
    if dataset is not None and dataset.owner_train is not None and "natural" not in partitions:
        raise UsageError(
            f"the owners of {dataset.name} count with partition=natural only, and partition is "
            f"{' or '.join(partitions)}; set partition to natural, or leave owners out"
        )


def nested(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names as groups; items of lists (phases[0].x) are left out."""
    found: dict[str, Any] = {}
    for path, value in paths.items():
        group, _, last = path.rpartition(".")
        if "[" not in path:
            (found.setdefault(group, {}) if group else found)[last] = value
    return found
