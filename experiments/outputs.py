"""Checks of the files that scripts write, before they measure for long."""

from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError


def require_folders(flag_values: Any, *names: str) -> None:
    """Raises UsageError if the file that one of these flags names is in no existing folder."""
    for name in names:
        path = flag_values[name].value
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{name}={path} is in no folder that exists")
