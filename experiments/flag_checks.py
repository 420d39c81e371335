"""Checks of flags, before scripts measure for long."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError


def require_folders(flag_values: Any, *names: str) -> None:
    """Raises UsageError if the file that one of these flags names is in no existing folder."""
    for name in names:
        path = flag_values[name].value
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{name}={path} is in no folder that exists")


def refuse_unread(flag_values: Any, names: Sequence[str], when: str) -> None:
    """Raises UsageError if a flag is given that has no effect; `when` ends the message."""
    for name in names:
        if not flag_values[name].using_default_value:
            flag_name = f"no{name}" if flag_values[name].value is False else name
            raise UsageError(f"--{flag_name} has no effect {when}; leave it out")
