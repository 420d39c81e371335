"""The runs that a folder holds, by their settings: what was computed once is found again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, run_reader
from fedjax_pfl.settings import configuration


class Known:
    """The runs in a folder, by their settings and seed."""

    def __init__(self, folder: Path) -> None:
        self._defaults = run_reader.known_settings()
        self.runs: dict[str, Path] = {}
        for path in sorted(folder.rglob("config.json")):
            try:
                config = run_reader.read_config(path.parent)
            except UsageError:
                continue  # damaged, or being written
            there = self.runs.get(key := self.key(config))
            if there is None or not (there / "report.html").is_file():
                self.runs[key] = path.parent

    def key(self, config: Mapping[str, Any]) -> str:
        """The same for runs that would give the same numbers."""
        same = comparison.common(config, self._defaults)
        return json.dumps([same, config.get("seed", 0)], sort_keys=True)

    def find(
        self, config: ConfigDict, words: configuration.Registry = configuration.BUILTINS
    ) -> tuple[str, Path | None]:
        """The key of a configuration, and where there is a run of it."""
        plain = json.loads(json.dumps(configuration.resolve(config, words)))
        return (key := self.key(plain)), self.runs.get(key)
