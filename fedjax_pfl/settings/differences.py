"""Differences between the configuration of a run directory and the one to resume it with."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fedjax_pfl.settings.configuration import default
from fedjax_pfl.settings.general import settings_with


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[str]:
    """Returns a line such as "clients (10 there, 20 here)" for each setting that differs.

    Settings that may change when a run is resumed are ignored. A setting that `old` lacks, because
    the library did not have it yet, has its default in `defaults` (None: the library's).
    """
    defaults = default().to_dict() if defaults is None else defaults
    return _differences(old, new, defaults, ignored=settings_with("resumable"))


def _differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    defaults: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> list[str]:
    """Returns the lines of `differences` for all settings but `ignored`.

    Settings of a group, such as fedfomo.reference, are never ignored.
    """
    lines: list[str] = []
    for key in sorted({*old, *new} - {*ignored}):
        usual = defaults.get(key)
        usual = list(usual) if isinstance(usual, tuple) else usual
        old_value, new_value = old.get(key, usual), new.get(key)
        if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
            inner = usual if isinstance(usual, Mapping) else {}
            lines += [f"{key}.{line}" for line in _differences(old_value, new_value, inner)]
        elif old_value != new_value:
            parts = _changed_rounds(old_value or (), new_value or ()) if key == "phases" else []
            lines += parts or [f"{key} ({old_value!r} there, {new_value!r} here)"]
    return lines


def _changed_rounds(old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    """Returns a line for each phase with other `rounds`; [] if phases differ in other settings.

    `old` and `new` are values of the setting `phases`: a mapping per phase.
    """
    if list(map(_without_rounds, old)) != list(map(_without_rounds, new)):
        return []
    pairs = enumerate((a.get("rounds"), b.get("rounds")) for a, b in zip(old, new, strict=True))
    return [f"phases[{i}].rounds ({a} there, {b} here)" for i, (a, b) in pairs if a != b]


def obstacle(
    old: Mapping[str, Any], new: Mapping[str, Any], fixed_length_reason: Callable[[], str]
) -> str:
    """Returns why a run cannot be resumed with another configuration, or "" if it can.

    It can if settings that may change differ, or if only rounds are added at the end.
    `fixed_length_reason` returns why more rounds would change the finished ones (as with a schedule
    over all rounds), or "".
    """
    changes = differences(old, new)
    reason = ""
    if changes and only_adds_rounds(old, new):
        reason = fixed_length_reason()
        if not reason:
            return ""
    return "; ".join(
        [*changes, *([f"it cannot be made longer, because {reason}"] if reason else [])]
    )


def only_adds_rounds(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Returns True if two resolved configurations differ only by more rounds of the last phase."""

    def same_rounds(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings with 1 for `rounds` and no rounds in the phases."""
        return {
            **settings,
            "rounds": 1,
            "phases": list(map(_without_rounds, settings.get("phases") or ())),
        }

    before, after = _rounds(old), _rounds(new)
    return (
        len(before) == len(after)
        and before[:-1] == after[:-1]
        and before[-1] < after[-1]
        and not differences(same_rounds(old), same_rounds(new))
    )


def _rounds(settings: Mapping[str, Any]) -> list[int]:
    """Returns the rounds of each phase of a resolved configuration."""
    return [phase.get("rounds", settings["rounds"]) for phase in settings.get("phases") or [{}]]


def _without_rounds(phase: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in phase.items() if key != "rounds"}
