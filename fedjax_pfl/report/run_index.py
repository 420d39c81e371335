"""Index of the runs in a folder by their settings, to reuse their results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, run_reader
from fedjax_pfl.settings import configuration


class RunIndex:
    """Index of the run directories below a folder, by settings and seed.

    Of runs with equal settings and seed it has one, a finished run if there is one. Damaged runs
    are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._defaults = run_reader.default_settings()
        self.runs: dict[str, Path] = {}
        for path in sorted(folder.rglob("config.json")):
            try:
                config = run_reader.read_config(path.parent)
            except UsageError:
                continue  # damaged, or being written
            existing = self.runs.get(key := self.key(config))
            if existing is None or not (existing / "report.html").is_file():
                self.runs[key] = path.parent

    def key(self, config: Mapping[str, Any]) -> str:
        """Returns a text, equal for configurations (complete, plain data) with equal results."""
        settings = comparison.result_settings(config, self._defaults)
        return json.dumps([settings, config.get("seed", 0)], sort_keys=True)

    def find(
        self, config: ConfigDict, registry: configuration.Registry = configuration.BUILTINS
    ) -> tuple[str, Path | None]:
        """Returns the key of a configuration, and the directory of a run of it or None.

        The run may be unfinished. `registry` has components by name, user-defined ones included.
        """
        resolved = run_reader.as_json(configuration.resolve(config, registry))
        return (key := self.key(resolved)), self.runs.get(key)
