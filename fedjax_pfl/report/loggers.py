"""Loggers: callables that copy evaluations to TensorBoard, Weights & Biases or MLflow.

    pfl.run(settings, "runs/A", on_evaluation=pfl.loggers.tensorboard("runs/A"))

The setting `log_to` does the same for every run of a sweep. A logger logs the numbers of
metrics.jsonl by round, under names such as before/accuracy_mean and diagnostics/one_hot, and the
settings as parameters.
Everything is written to the run directory, and nothing is sent, unless the environment has
WANDB_MODE or MLFLOW_TRACKING_URI.
"""

import contextlib
import importlib
import json
import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.report import run_reader
from fedjax_pfl.settings.configuration import suggestion

EVENT_FILE = Path("tensorboard") / "events.out.tfevents.run"
_PROJECT = "fedjax_pfl"  # of Weights & Biases; experiment of MLflow
# Numbers of metrics.jsonl that are not logged: loggers have their own step and clock.
_POSITION = ("round", "phase", "best_round")
_CLOCK = ("seconds", "evaluate_seconds", "compile_seconds", "checkpoint_seconds")
_PACKAGES = {
    "tensorboard": ("tensorboardX.proto.event_pb2",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
# Both packages report errors or usage to their makers unless this is set before the import.
_SILENCE = {
    "wandb": ("WANDB_ERROR_REPORTING", "false"),
    "mlflow": ("MLFLOW_DISABLE_TELEMETRY", "true"),
}
_MAX_MLFLOW_PARAMETERS, _MAX_MLFLOW_CHARACTERS = 100, 6000  # per call, and per value


class Logger(NamedTuple):
    """Callable for `on_evaluation`: it gets lines of metrics.jsonl.

    At its first line it starts the log of its directory anew. If this is a run directory, it also
    logs the run's settings and earlier lines.
    """

    log: Callable[[Mapping[str, Any]], None]  # logs a line
    close: Callable[[], None]  # marks the log as finished

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Logs a line of metrics.jsonl."""
        self.log(line)


def tensorboard(directory: str | Path) -> Logger:
    """Returns a logger that writes an event file for TensorBoard to `directory`/tensorboard."""
    return _logger("tensorboard", Path(directory), _start_tensorboard)


def wandb(directory: str | Path) -> Logger:
    """Returns a logger that writes an offline run of Weights & Biases to `directory`/wandb.

    `wandb sync` uploads it. WANDB_MODE=online in the environment uploads while the run trains.
    """
    return _logger("wandb", Path(directory), _start_wandb)


def mlflow(directory: str | Path) -> Logger:
    """Returns a logger that writes an MLflow run to the database `directory`/mlflow/mlflow.db.

    MLFLOW_TRACKING_URI in the environment names another database, or a server.
    """
    return _logger("mlflow", Path(directory), _start_mlflow)


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def from_setting(log_to: str, directory: str | Path) -> list[Logger]:
    """Returns the loggers that the setting `log_to` names, separated by commas.

    Raises UsageError if one is unknown or its package is not installed.
    """
    names = list(dict.fromkeys(name.strip() for name in log_to.split(",") if name.strip()))
    for name in names:
        if name not in LOGGERS:
            raise UsageError(f"log_to has no {name!r}{suggestion(name, LOGGERS)}")
    return [LOGGERS[name](directory) for name in names]


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields (name, value), such as before/accuracy_mean, of numbers in a line of metrics.jsonl."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, bool):
            continue  # a fact of a metric, such as higher_is_better
        elif isinstance(value, int | float) and prefix + key not in (*_POSITION, *_CLOCK):
            yield prefix + key, value


def parameters(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | float | str]:
    """Returns the settings that are not unset by name, such as mlp.hidden; lists become JSON."""
    settings_by_name: dict[str, bool | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            settings_by_name |= parameters(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            settings_by_name[prefix + key] = value
        elif value is not None:
            settings_by_name[prefix + key] = json.dumps(value)
    return settings_by_name


def _logger(
    name: str, directory: Path, start: Callable[[Path, Mapping[str, Any]], Logger]
) -> Logger:
    """Returns a logger that calls start(directory, settings) -> logger at its first line.

    Raises UsageError if the packages of `name` are not installed.
    """
    if name in _SILENCE:
        os.environ.setdefault(*_SILENCE[name])
    try:
        for package in _PACKAGES[name]:
            importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"{name} is not installed ({error}); run pip install '.[{name}]' in the clone"
        ) from None
    started: list[Logger] = []

    def log(line: Mapping[str, Any]) -> None:
        with _as_usage_error(name):
            if started:
                started[0].log(line)
                return
            config, metrics = dict[str, Any](), list[dict[str, Any]]()
            if (directory / run_reader.METRICS).is_file():
                config = run_reader.read_config(directory)
                metrics = run_reader.read_metrics(directory)
            directory.mkdir(parents=True, exist_ok=True)
            started.append(start(directory, parameters(config)))
            for earlier in metrics:
                if earlier["round"] < line["round"]:
                    started[0].log(earlier)
            started[0].log(line)

    def close() -> None:
        with _as_usage_error(name):
            while started:
                started.pop().close()

    return Logger(log, close)


@contextlib.contextmanager
def _as_usage_error(name: str) -> Iterator[None]:
    """Turns an error of the package `name`, such as a missing login, into a UsageError."""
    try:
        yield
    except (UsageError, OSError):
        raise
    except Exception as error:
        raise UsageError(
            f"{name} failed ({first_line(error)}); repair it and repeat the command or call to "
            "resume, or leave it out of log_to"
        ) from error


def _start_time(directory: Path) -> float:
    """Returns the seconds since 1970 at which a run started; now, if there is no run directory."""
    path = directory / run_reader.CONFIG  # written once, at the start
    return path.stat().st_mtime if path.exists() else time.time()


def _time_of(start: float, line: Mapping[str, Any]) -> float:
    """Returns `start` plus the recorded seconds of a line, without interruptions."""
    return start + sum(line.get(f"{part}seconds") or 0 for part in ("", "compile_", "checkpoint_"))


def _start_tensorboard(directory: Path, settings: Mapping[str, Any]) -> Logger:
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import hparams

    path, start = directory / EVENT_FILE, _start_time(directory)
    path.parent.mkdir(exist_ok=True)
    records = [_record(wall_time=start, file_version="brain.Event:2")]
    if settings:
        # Without the first of the three summaries TensorBoard finds the metrics itself.
        records += [_record(wall_time=start, summary=s) for s in hparams(dict(settings), {})[1:]]
    path.write_bytes(b"".join(records))

    def append(line: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        record = _record(
            wall_time=_time_of(start, line), step=line["round"], summary=Summary(value=values)
        )
        with open(path, "ab") as file:
            file.write(record)

    return Logger(append, lambda: None)


def _record(**fields: Any) -> bytes:
    """Returns an Event of the given fields as a TFRecord: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content = Event(**fields).SerializeToString()
    length = struct.pack("<Q", len(content))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + sums[0] + content + sums[1]


def _start_wandb(directory: Path, settings: Mapping[str, Any]) -> Logger:
    import wandb

    folder = directory / "wandb"
    run_id = _saved_id(folder) or secrets.token_hex(4)
    for earlier in folder.glob(f"offline-run-*-{run_id}"):
        shutil.rmtree(earlier)
    mode = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(
        dir=directory,
        id=run_id,
        resume=None if mode == "offline" else "allow",
        mode=mode,
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=directory.absolute().name,
        config=dict(settings),
        reinit="create_new",
        settings=wandb.Settings(
            silent=mode == "offline",
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    )
    _save_id(folder, run_id)

    def append(line: Mapping[str, Any]) -> None:
        run.log(dict(scalars(line)), step=line["round"])

    return Logger(append, run.finish)


def _start_mlflow(directory: Path, settings: Mapping[str, Any]) -> Logger:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException

    folder, start = directory / "mlflow", _start_time(directory)
    folder.mkdir(exist_ok=True)
    local = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local)
    if run_id := _saved_id(folder):
        with contextlib.suppress(MlflowException):  # of another database
            client.delete_run(run_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    experiment = client.get_experiment_by_name(name)
    run = client.create_run(
        experiment.experiment_id if experiment else client.create_experiment(name),
        run_name=directory.absolute().name,
        start_time=int(1000 * start),
    )
    run_id = run.info.run_id
    _save_id(folder, run_id)
    texts = [Param(key, str(value)[:_MAX_MLFLOW_CHARACTERS]) for key, value in settings.items()]
    for begin in range(0, len(texts), _MAX_MLFLOW_PARAMETERS):
        client.log_batch(run_id, params=texts[begin : begin + _MAX_MLFLOW_PARAMETERS])

    def append(line: Mapping[str, Any]) -> None:
        milliseconds = int(1000 * _time_of(start, line))
        values = [Metric(key, v, milliseconds, line["round"]) for key, v in scalars(line)]
        client.log_batch(run_id, metrics=values)

    return Logger(append, lambda: client.set_terminated(run_id))


def _saved_id(folder: Path) -> str:
    """Returns the id that the run of this directory has at the service, or ""."""
    path = folder / "run_id"
    return path.read_text() if path.exists() else ""


def _save_id(folder: Path, run_id: str) -> None:
    (folder / "run_id").write_text(run_id)
