"""The flag --set=KEY=VALUE of scripts that make many runs."""

import json
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.cli.configs import check_keys
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings import configuration

HELP = (
    "KEY=VALUE for every run; KEY may have dots, VALUE is JSON or a word; see fedjax-pfl list "
    "settings"
)


def _parse(value: str, default: Any) -> Any:
    """Reads JSON; also a word without quotes for a text, and Python's True, None, .1 and 10."""
    try:
        return json.loads(value)
    except ValueError:
        if isinstance(default, str):
            return value
        python = {"True": True, "False": False, "None": None}
        return python[value] if value in python else float(value)


def override(config: ConfigDict, pairs: Sequence[str]) -> None:
    """Changes settings by KEY=VALUE pairs."""
    for pair in pairs:
        key, _, value = pair.partition("=")
        check_keys([f"--config.{key}"])
        *groups, last = key.split(".")
        level = config
        try:
            for group in groups:
                level = level[group]
            parsed = _parse(value, level[last])
        except (KeyError, AttributeError, ValueError, TypeError):
            raise UsageError(f"--set={pair} is no KEY=VALUE of this configuration") from None
        configuration.override(level, {last: parsed}, "".join(f"{group}." for group in groups))
