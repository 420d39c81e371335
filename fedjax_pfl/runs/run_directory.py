"""Files of a run directory, and the lock that keeps other processes out."""

import contextlib
import datetime
import errno
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, first_line, removed_directory
from fedjax_pfl.report import csv_text, run_reader
from fedjax_pfl.settings.differences import obstacle, only_adds_rounds
from fedjax_pfl.settings.general import SETTINGS
from fedjax_pfl.simulation.execution_plan import Plan, machine
from fedjax_pfl.simulation.ledger import Ledger

try:
    import fcntl
except ImportError:  # Windows, where no directory can be opened either
    fcntl = None  # type: ignore[assignment]

# Files beside config.json that a run writes before its first evaluation.
_FIRST_FILES = (run_reader.EXAMPLES, "plan.json", run_reader.PROVENANCE, run_reader.METRICS)
Observations = dict[str, tuple[list[int], list[np.ndarray]]]  # by name: rounds and arrays


@contextlib.contextmanager
def claim(
    directory: Path, config: Mapping[str, Any], fixed_length_reason: Callable[[], str] = str
) -> Iterator[Path]:
    """Locks a run directory while the context lasts, and creates it if it does not exist.

    Raises UsageError if it has results of another configuration than `config` or cannot be used.
    `fixed_length_reason` returns why more rounds would change the finished ones, or "".
    """
    if "\0" in str(directory):
        raise UsageError(f"{str(directory)!r} cannot name a directory; choose another")
    try:
        if directory.is_file():
            raise UsageError(f"{directory} is not empty and holds no run; choose another workdir")
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = None if fcntl is None else os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise _unusable(directory, error) from None
    try:
        _lock(directory, descriptor)
        try:
            _write_or_check_config(directory, config, fixed_length_reason)
        except OSError as error:
            raise _unusable(directory, error) from None
        yield directory
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _unusable(directory: Path, error: OSError) -> UsageError:
    problem = f"{directory} cannot be used ({error.strerror})"
    return UsageError(f"{problem}; {_advice(error)}, or choose another workdir")


def _advice(error: OSError) -> str:
    """Returns advice on an error of the file system, such as "make it writable"."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free space on its disk"
    is_read_only = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "make it writable" if is_read_only else "correct that"


@contextlib.contextmanager
def writing(
    directory: Path | None, checkpoint_rounds: Callable[[], Sequence[int]] | None = None
) -> Iterator[None]:
    """Turns a failure to write inside the context into a UsageError that says what to do.

    Without a directory, exceptions pass unchanged. `checkpoint_rounds` returns the rounds of the
    checkpoints, newest first; the message names the newest as the one to resume from.
    """
    if directory is None:
        yield
        return
    config = directory / "config.json"
    try:
        if not config.is_file():
            raise FileNotFoundError(errno.ENOENT, "config.json is missing")
        yield
    except UsageError:
        raise
    except Exception as error:  # orbax raises any exception of its layers
        if not config.is_file():
            raise removed_directory(directory) from error
        if not isinstance(error, OSError):
            raise
        rounds = checkpoint_rounds() if checkpoint_rounds else []
        saved = (
            f"its checkpoint of round {rounds[0]} is intact" if rounds else "it has no checkpoint"
        )
        raise UsageError(
            f"{directory} cannot be written ({error.strerror or error}), so this run stops; "
            f"{saved}: {_advice(error)} and run the same command or call again"
        ) from error


def _lock(directory: Path, descriptor: int | None) -> None:
    """Locks the directory by its open file descriptor; without one (on Windows) prints a warning.

    Raises UsageError if another process has the lock.
    """
    if descriptor is None:
        line = f"{directory} is not locked, as this system cannot; start no other run in it"
        print(line, file=sys.stderr)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{directory} is in use by another process; wait for it or choose another workdir"
        ) from None
    except OSError as error:  # some network file systems do not support this lock
        line = f"{directory} cannot be locked ({error.strerror}); start no other run in it"
        print(line, file=sys.stderr)


def _write_or_check_config(
    directory: Path, config: Mapping[str, Any], fixed_length_reason: Callable[[], str]
) -> None:
    """Writes config.json, or raises UsageError if the existing one is of a run with other results.

    Arguments are as for `claim`. The config.json of a shorter run stays; see `lengthen`. A run
    without results makes way for any other.
    """
    config_file = directory / "config.json"
    if config_file.exists():
        saved = run_reader.read_config(directory)
        if not has_results(directory):
            for name in _FIRST_FILES:
                (directory / name).unlink(missing_ok=True)
            write_json(config_file, config)
            return
        if problem := obstacle(saved, config, fixed_length_reason):
            raise UsageError(
                f"{directory} holds a run with other settings: {problem}; choose another workdir"
            )
        if not os.access(directory, os.W_OK):
            raise UsageError(f"{directory} cannot be written; choose another workdir")
        return
    # A run that was killed at the start leaves a partial config.json.
    if {p.name for p in directory.iterdir()} - {_temporary(config_file).name}:
        raise UsageError(f"{directory} is not empty and holds no run; choose another workdir")
    write_json(config_file, config)


def has_results(directory: Path) -> bool:
    """Returns whether a run directory has more than a run writes before its first evaluation."""
    names = {path.name for path in directory.iterdir()}
    metrics = directory / run_reader.METRICS
    return bool(
        names - {"config.json", "checkpoints", *_FIRST_FILES}
        or any(directory.glob("checkpoints/*"))
        or (metrics.exists() and metrics.stat().st_size)
    )


def lengthen(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes config.json and removes the report if `config` adds rounds to the run."""
    if only_adds_rounds(run_reader.read_config(directory), config):  # it is no longer finished
        (directory / run_reader.REPORT).unlink(missing_ok=True)
        write_json(directory / "config.json", config)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _replace(path: Path, content: str | bytes) -> None:
    """Writes a file atomically: a reader sees the old content or the new one."""
    _temporary(path).write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(_temporary(path), path)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file."""
    _replace(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_metrics(directory: Path, metrics: list[dict[str, Any]]) -> None:
    """Writes metrics.jsonl, one line per evaluation."""
    lines = (json.dumps(line, allow_nan=False) + "\n" for line in metrics)
    _replace(directory / "metrics.jsonl", "".join(lines))


def append_metrics(directory: Path, line: dict[str, Any]) -> None:
    """Appends the line of an evaluation to metrics.jsonl."""
    with open(directory / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def write_clients(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Writes clients.csv, one row per client."""
    _replace(directory / "clients.csv", csv_text.text(rows))


def write_confusion(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes confusion.json; nothing if `content` is empty, without confusion matrices."""
    if content:
        _replace(directory / run_reader.CONFUSION, json.dumps(content) + "\n")


def write_observations(directory: Path, observations: Observations) -> None:
    """Writes NAME.npz for each observation: `rounds` [E] and `values` [E, ...] of E evaluations."""
    for name, (rounds, arrays) in observations.items():
        buffer = io.BytesIO()
        np.savez_compressed(buffer, rounds=np.asarray(rounds), values=np.stack(arrays))
        _replace(directory / f"{name}.npz", buffer.getvalue())


def read_observations(directory: Path, until: int, *, read_only: bool = False) -> Observations:
    """Reads the observations of NAME.npz files up to round `until`.

    Leaves out other .npz files and damaged ones, and renames the latter to *.damaged unless
    `read_only`.
    """
    observations: Observations = {}
    for path in sorted(directory.glob("*.npz")):
        try:
            with np.load(path, allow_pickle=False) as file:
                is_observation = {"rounds", "values"} <= {*file.files}
                if not is_observation and file.zip.testzip() is None:  # an intact file of the user
                    continue
                values = file["values"]
                if values.dtype.kind == "V":
                    raise ValueError("its values have a type that NumPy cannot read")
                pairs = zip(file["rounds"], values, strict=True)
                entries = [(int(r), array) for r, array in pairs if r <= until]
        except Exception as error:  # zipfile, zlib and NumPy raise many types
            action = "it is left out"
            if not read_only:
                os.replace(path, path.with_name(f"{path.name}.damaged"))
                action = f"renamed to {path.name}.damaged, a new one is begun"
            print(f"{path} is damaged ({first_line(error)}); {action}", file=sys.stderr)
            continue
        if entries:
            observations[path.stem] = ([r for r, _ in entries], [array for _, array in entries])
    return observations


def write_provenance(directory: Path) -> None:
    """Writes provenance.json: start time, command and versions. A resume adds other versions."""
    versions = []
    for package in ("fedjax_pfl", "jax", "flax", "optax", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    current = {"versions": ", ".join(versions), "python": platform.python_version()} | _commit()
    path = directory / run_reader.PROVENANCE
    if not path.exists():
        started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        write_json(path, {"started": started, "command": _command()} | current)
    elif saved := run_reader.read_provenance(directory):
        history = {key: saved.get(key, "unknown") for key in current}
        for key, value in current.items():
            if not history[key].endswith(value):
                history[key] += f"; then {value}"
        write_json(path, saved | history)


def _commit() -> dict[str, str]:
    """Returns the field `commit` if this library runs from its own checkout, else {}."""
    file = Path(__file__)
    lines = []
    for arguments in (
        ["ls-files", "--error-unmatch", file.name],
        ["describe", "--always", "--dirty"],
    ):
        command = ["git", "-C", str(file.parent), *arguments]
        try:
            lines.append(subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True))
        except (OSError, subprocess.CalledProcessError):
            return {}
    return {"commit": lines[-1].strip()}


def _command() -> str:
    """Returns the command line of this process, without the folder of an installed program."""
    arguments = sys.orig_argv[1:]
    if "ipykernel_launcher" in " ".join(arguments):
        return "fedjax_pfl.run in a notebook"
    if arguments and Path(arguments[0]).is_absolute():  # an installed script
        return shlex.join([Path(arguments[0]).name, *arguments[1:]])
    return shlex.join(["python", *arguments])


def write_examples(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes data.json (`facts`). Raises UsageError if the run started with other examples."""
    if facts:
        if (directory / run_reader.EXAMPLES).exists() or any(directory.glob("checkpoints/[0-9]*")):
            check_examples(directory, facts)
        write_json(directory / run_reader.EXAMPLES, facts)


def check_examples(directory: Path, facts: Mapping[str, Any]) -> None:
    """Raises UsageError if a digest in `facts` is not that of data.json, or data.json has none.

    Passes if `facts` has no digest.
    """
    contents = {
        "digest": "examples",
        "initial_weights": "initial weights",
        "speed_trace": "client speeds",
    }
    for key, content in contents.items():
        saved_digest = run_reader.read_digest(directory, key)
        if key not in facts or saved_digest == facts[key]:
            continue
        if saved_digest is None:
            raise UsageError(
                f"{directory / run_reader.EXAMPLES} is missing or damaged, so the {content} of "
                "this run are unknown; restore the file from a copy, or choose another workdir"
            )
        raise UsageError(
            f"{directory} was begun with other {content}: the files that it reads have changed "
            "since; restore them, or choose another workdir"
        )


def write_plans(directory: Path, plans: Sequence[Plan]) -> None:
    """Writes plan.json: the execution plan of each phase, and the machine."""
    content = {"machine": machine(), "phases": [plan._asdict() for plan in plans]}
    write_json(directory / "plan.json", content)


def read_plans(directory: Path) -> list[Plan] | None:
    """Returns the execution plan of each phase in plan.json, or None.

    Plans of a run without results, or made on another kind of machine, do not count.
    """
    try:
        if not has_results(directory):
            return None
        content = json.loads((directory / "plan.json").read_text())
        if content["machine"] != machine():
            return None
        plans = [Plan(**plan) for plan in content["phases"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    is_valid = all(
        plan.conv in SETTINGS["conv"].choices and type(plan.chunk) is int and plan.chunk >= 1
        for plan in plans
    )
    return plans if is_valid else None


def traffic(ledger: Ledger) -> dict[str, Any]:
    """Returns the content of traffic.json: bytes of all rounds and clients by layer, and totals."""
    return {
        "down": ledger.down,
        "up": ledger.up,
        "total_down": ledger.total_down,
        "total_up": ledger.total_up,
    }


def write_traffic(directory: Path, ledger: Ledger) -> None:
    """Writes traffic.json: bytes by layer and direction."""
    write_json(directory / "traffic.json", traffic(ledger))
