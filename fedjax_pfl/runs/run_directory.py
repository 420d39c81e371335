"""A run directory's files: what is in it, who may use it, and how they are written whole."""

import contextlib
import datetime
import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, removed_directory
from fedjax_pfl.report import csv_tables, run_reader
from fedjax_pfl.settings.differences import differences, only_adds_rounds
from fedjax_pfl.settings.general import SETTINGS
from fedjax_pfl.simulation.execution_plan import Plan, machine
from fedjax_pfl.simulation.ledger import Ledger

try:
    import fcntl
except ImportError:  # Windows, where no directory can be opened either
    fcntl = None  # type: ignore[assignment]

Observations = dict[str, tuple[list[int], list[np.ndarray]]]  # by name: rounds, and what was seen


@contextlib.contextmanager
def claimed(
    directory: Path, config: Mapping[str, Any], fixed_length: Callable[[], str] = str
) -> Iterator[Path]:
    """Lock the directory for this run while the context lasts; UsageError if it is another run's.

    Args:
      fixed_length: why a run that has begun cannot be made longer; nothing where it can.
    """
    try:
        if directory.is_file():
            raise UsageError(f"{directory} is not empty and holds no run; choose another workdir")
        directory.mkdir(parents=True, exist_ok=True)
        held = None if fcntl is None else os.open(directory, os.O_RDONLY)
    except UsageError:
        raise
    except ValueError:  # a zero byte
        raise UsageError(f"{str(directory)!r} cannot name a directory; choose another") from None
    except OSError as error:
        raise _unusable(directory, error) from None
    try:
        _lock(directory, held)
        try:
            _claim(directory, directory / "config.json", config, fixed_length)
        except OSError as error:
            raise _unusable(directory, error) from None
        yield directory
    finally:
        if held is not None:
            os.close(held)


def _unusable(directory: Path, error: OSError) -> UsageError:
    what = f"{directory} cannot be used ({error.strerror})"
    return UsageError(f"{what}; {_advice(error)}, or choose another workdir")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def _advice(error: OSError) -> str:
    if error.errno in _FULL:
        return "make room on its disk"
    return "make it writable" if error.errno in _CLOSED else "mend that"


@contextlib.contextmanager
def writing(
    directory: Path | None, saved: Callable[[], Sequence[int]] | None = None
) -> Iterator[None]:
    """Turns a failure to write inside the context into one line that says why and what to do.

    Args:
      saved: gives the rounds of which there is a checkpoint, newest first.
    """
    known = directory and directory / "config.json"
    try:
        if known and not known.is_file():
            raise FileNotFoundError(errno.ENOENT, "it is not there any more")
        yield
    except Exception as error:  # orbax raises whatever its layers raise
        if known is None or isinstance(error, UsageError):
            raise
        if not known.is_file():
            raise removed_directory(directory) from error
        if not isinstance(error, OSError):
            raise
        rounds = saved() if saved else []
        there = (
            f"its checkpoint of round {rounds[0]} is whole" if rounds else "it has no checkpoint"
        )
        raise UsageError(
            f"{directory} cannot be written ({error.strerror or error}), so this run stops; "
            f"{there}: {_advice(error)} and give the same command or call again"
        ) from error


def _lock(directory: Path, held: int | None) -> None:
    """A process that dies, in whatever way, gives it back."""
    if held is None:
        line = f"{directory} is not locked, as this system cannot; start no other run in it"
        print(line, file=sys.stderr)
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{directory} is in use by another process; wait for it or choose another workdir"
        ) from None
    except OSError as error:  # some network file systems know no such lock
        line = f"{directory} cannot be locked ({error.strerror}); start no other run in it"
        print(line, file=sys.stderr)


def _claim(
    directory: Path, known: Path, config: Mapping[str, Any], fixed_length: Callable[[], str]
) -> None:
    if known.exists():
        there = run_reader.read_config(directory)
        longer = only_adds_rounds(there, config)
        why = fixed_length() if longer else ""
        different = differences(there, config)
        if different and (why or not longer):
            raise UsageError(
                f"{directory} holds a run with other settings: {'; '.join(different)}"
                f"{why and f'; it cannot be made longer, because {why}'}; choose another workdir"
            )
        if not os.access(directory, os.W_OK):
            raise UsageError(f"{directory} cannot be written; choose another workdir")
        if longer:  # it is not finished any more
            (directory / "report.html").unlink(missing_ok=True)
            write_json(known, config)
        return
    # A run that was killed before anything else leaves the first file half written.
    if {p.name for p in directory.iterdir()} - {_part(known).name}:
        raise UsageError(f"{directory} is not empty and holds no run; choose another workdir")
    write_json(known, config)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _whole(path: Path, text: str) -> None:
    """Replace a file at once: whoever reads it finds the old one or the new one."""
    _part(path).write_text(text)
    os.replace(_part(path), path)


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
    with open(part, "w", newline="", encoding="utf-8") as file:
        csv_tables.write(file, rows)
    os.replace(part, directory / "clients.csv")


def write_observations(directory: Path, seen: Observations) -> None:
    """NAME.npz for each: `rounds` [E] and `values` [E, ...]."""
    for name, (rounds, values) in seen.items():
        part = directory / f"{name}.npz.part"
        with open(part, "wb") as file:
            np.savez_compressed(file, rounds=np.asarray(rounds), values=np.stack(values))
        os.replace(part, directory / f"{name}.npz")


def read_observations(directory: Path, until: int, *, only_read: bool = False) -> Observations:
    """What was observed up to a round. A damaged file is set aside, or left out; it begins anew."""
    seen: Observations = {}
    for path in sorted(directory.glob("*.npz")):
        try:
            with np.load(path, allow_pickle=False) as file:
                both = zip(file["rounds"], file["values"], strict=True)
                kept = [(int(r), v) for r, v in both if r <= until]
        except Exception as error:  # zipfile, zlib and NumPy raise what they like
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            line = f"{path} is damaged ({reason}); it is left out"
            if not only_read:
                aside = path.with_name(path.name + ".damaged")
                os.replace(path, aside)
                line = f"{path} is damaged ({reason}); it is now {aside.name} and begins anew"
            print(line, file=sys.stderr)
            continue
        if kept:
            seen[path.stem] = ([r for r, _ in kept], [v for _, v in kept])
    return seen


def write_made(directory: Path) -> None:
    """made.json: when and by what command a run began, and every state of the software it had."""
    packages = ("fedjax_pfl", "jax", "flax", "optax", "numpy")
    versions = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    python = ".".join(map(str, sys.version_info[:3]))
    states = {"versions": ", ".join(versions), "python": python} | _commit()
    path = directory / run_reader.MADE
    if not path.exists():
        began = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        write_json(path, {"began": began, "command": _command()} | states)
    elif there := run_reader.read_made(directory):
        later = {key: there.get(key, "unknown") for key in states}
        later |= {k: f"{later[k]}; then {v}" for k, v in states.items() if not later[k].endswith(v)}
        write_json(path, there | later)


def _commit() -> dict[str, str]:
    """The commit of this library, where it runs from a checkout of its own."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run(
            [*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True
        )
        asked = [*git, "describe", "--always", "--dirty"]
        found = subprocess.run(asked, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": found.stdout.strip()}


def _command() -> str:
    """As it can be given again, without the places of this machine's programs."""
    words = sys.orig_argv[1:]
    if "ipykernel_launcher" in " ".join(words):
        return "fedjax_pfl.run in a notebook"
    if words and Path(words[0]).is_absolute():  # a script that was installed
        return shlex.join([Path(words[0]).name, *words[1:]])
    return shlex.join(["python", *words])


def write_examples(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes data.json: what the numbers of examples stand for, and a digest of files' examples.

    Raises UsageError if the run began with other examples.
    """
    if not facts:
        return
    if (directory / run_reader.EXAMPLES).exists() or any(directory.glob("checkpoints/[0-9]*")):
        check_examples(directory, facts)
    write_json(directory / run_reader.EXAMPLES, facts)


def check_examples(directory: Path, facts: Mapping[str, Any]) -> None:
    """Raises UsageError if a run was begun with other examples, or if nothing says with which."""
    recorded = run_reader.read_examples(directory)
    if "digest" not in facts or recorded == facts["digest"]:
        return
    if recorded is None:
        raise UsageError(
            f"{directory / run_reader.EXAMPLES} is missing or damaged, so nothing says whether "
            "this run was begun with the same examples; bring it back from a copy, or choose "
            "another workdir"
        )
    raise UsageError(
        f"{directory} was begun with other examples: the files that it reads have changed "
        "since; put them back, or choose another workdir"
    )


def write_plans(directory: Path, plans: Sequence[Plan]) -> None:
    """plan.json: how each phase's work is laid out, and on what machine."""
    content = {"machine": machine(), "phases": [plan._asdict() for plan in plans]}
    write_json(directory / "plan.json", content)


def read_plans(directory: Path) -> list[Plan] | None:
    """Those of a run that goes on, if made on such a machine; results do not hang on them."""
    try:
        found = json.loads((directory / "plan.json").read_text())
        plans = (
            [Plan(**plan) for plan in found["phases"]] if found["machine"] == machine() else None
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return plans if plans is None or all(map(_can_be_used, plans)) else None


def _can_be_used(plan: Plan) -> bool:
    return plan.conv in SETTINGS["conv"].choices and type(plan.chunk) is int and plan.chunk >= 1


def traffic(ledger: Ledger) -> dict[str, Any]:
    """Bytes by layer and direction, as traffic.json has them."""
    return {
        "down": ledger.down,
        "up": ledger.up,
        "total_down": ledger.total_down,
        "total_up": ledger.total_up,
    }


def write_traffic(directory: Path, ledger: Ledger) -> None:
    """traffic.json."""
    write_json(directory / "traffic.json", traffic(ledger))
