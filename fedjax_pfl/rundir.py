"""A run directory's files: what is in it, who may use it, and how they are written whole."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_pfl import config as configuration
from fedjax_pfl.errors import UsageError
from fedjax_pfl.ledger import Ledger


def claim(directory: Path, config: Mapping[str, Any]) -> Path:
    """Make the directory this run's own, or raise UsageError where it is another's."""
    known = directory / "config.json"
    if known.exists():
        try:
            there = json.loads(known.read_text())
        except ValueError:
            raise UsageError(f"{known} is damaged; choose another --workdir") from None
        if different := configuration.differences(there, config):
            raise UsageError(
                f"{directory} holds a run with other settings: {'; '.join(different)}; "
                "choose another --workdir"
            )
        return directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} is not empty and holds no run; choose another --workdir")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(known, config)
    except OSError as error:
        raise UsageError(f"{directory} cannot be written ({error.strerror})") from None
    return directory


def _whole(path: Path, text: str) -> None:
    """Replace a file at once: whoever reads it finds the old one or the new one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """One JSON file."""
    _whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_metrics(directory: Path, metrics: list[dict[str, Any]]) -> None:
    """metrics.jsonl: one line per evaluation."""
    lines = (json.dumps(line, allow_nan=False) + "\n" for line in metrics)
    _whole(directory / "metrics.jsonl", "".join(lines))


def append_metrics(directory: Path, line: dict[str, Any]) -> None:
    """Add the line of one evaluation to metrics.jsonl."""
    with open(directory / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def write_clients(directory: Path, rows: list[dict[str, Any]]) -> None:
    """clients.csv: a row per client."""
    part = directory / "clients.csv.part"
    with open(part, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, directory / "clients.csv")


def write_traffic(directory: Path, ledger: Ledger) -> None:
    """traffic.json: bytes by layer and direction."""
    content = {
        "down": ledger.down,
        "up": ledger.up,
        "total_down": ledger.total_down,
        "total_up": ledger.total_up,
    }
    write_json(directory / "traffic.json", content)
