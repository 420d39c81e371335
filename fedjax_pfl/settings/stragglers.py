"""Settings of simulated time and stragglers, and the speeds that they select."""

import csv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.core.setting import Limits, Setting
from fedjax_pfl.simulation.speeds import Speeds, round_steps
from fedjax_pfl.transforms.partial_work import check_partial, transfer_bytes

STRAGGLERS = {
    "step_seconds": Setting(
        float,
        "Simulated seconds of a local step: the median of the clients, whose seconds are "
        "log-normal and drawn by seed. Unset: no simulated time.",
        limits=Limits(above=0),
    ),
    "speed_spread": Setting(
        0.0,
        "Standard deviation of the logarithm of the clients' seconds per step.",
        limits=Limits(low=0, high=10),
    ),
    "speed_trace": Setting(
        "",
        "CSV or .npy file with a row per client, instead of step_seconds: seconds per step and, "
        "in an optional second column, bandwidth.",
    ),
    "bandwidth": Setting(
        float,
        "Bytes per second of every client in each direction; unset: transfers take no time.",
        limits=Limits(above=0),
    ),
    "deadline": Setting(
        float,
        "Simulated seconds of a round after which the server waits for no client; unset: it "
        "waits for the last one.",
        limits=Limits(above=0),
    ),
    "late": Setting(
        "missing",
        "Update of a client that misses the deadline. missing: none. partial: that of the steps "
        "that fit, with the normalised mean of FedNova.",
        choices=("missing", "partial"),
    ),
}


def client_speeds(
    value_of: Callable[[str], Any],
    federation: Federation,
    data: FederatedData,
    make_algorithm: Callable[[Mapping[str, Any]], Algorithm],
) -> Speeds | None:
    """Returns the speeds that the settings select, or None if they select no simulated time.

    Raises UsageError for settings that do not fit together and for a trace that does not fit.

    Args:
      value_of: Name of a setting -> its value.
      federation: Tells the number of clients and of their examples.
      data: Examples; only their shapes matter.
      make_algorithm: Returns the method, given other values of some settings.
    """
    trace, median = value_of("speed_trace"), value_of("step_seconds")
    if median is None and not trace:
        for name, setting in STRAGGLERS.items():
            if value_of(name) != setting.default_value:
                raise UsageError(f"{name} needs step_seconds or speed_trace; set one of them")
        return None
    bandwidth = value_of("bandwidth") or np.inf
    if trace:
        for name in ("step_seconds", "speed_spread"):
            if value_of(name):
                raise UsageError(f"speed_trace replaces {name}; leave one of them out")
        columns = read_trace(trace, federation.clients)
        median = columns[0]
        if len(columns) > 1:
            if np.isfinite(bandwidth):
                raise UsageError(f"bandwidth is also in {trace}; leave one of them out")
            bandwidth = columns[1]
    is_partial = value_of("late") == "partial"
    if is_partial:
        check_partial(value_of, make_algorithm, data)
    algorithm = make_algorithm({})
    return Speeds(
        steps=round_steps(algorithm, federation, data),
        step_seconds=median,
        spread=value_of("speed_spread"),
        bandwidth=bandwidth,
        deadline=value_of("deadline") or np.inf,
        free_rounds=0 if value_of("count_initial_download") else 1,
        partial_bytes=transfer_bytes(algorithm, data) if is_partial else None,
    )


def read_trace(path: str, clients: int) -> list[np.ndarray]:
    """Returns the columns of a trace, float32 [N] each: seconds per step and, if any, bandwidth.

    A CSV file may have a row of names. Raises UsageError if the file is unreadable or has no row of
    one or two positive numbers for each client.
    """
    try:
        if path.endswith(".npy"):
            with open(path, "rb") as content:  # NumPy leaves a damaged file open
                rows = np.load(content, allow_pickle=False)
        else:
            with Path(path).open(newline="", encoding="utf-8-sig") as file:
                lines = [line for line in csv.reader(file) if line]
            rows = np.array([list(map(float, line)) for line in lines[_has_names(lines) :]])
        table = np.asarray(rows, np.float32).reshape(len(rows), -1)
    except OSError as error:
        raise UsageError(f"speed_trace {path} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, EOFError, csv.Error, zipfile.BadZipFile):
        raise UsageError(
            f"speed_trace {path} is no table of numbers; give it a row for each client"
        ) from None
    if len(table) != clients or table.shape[1] not in (1, 2):
        raise UsageError(
            f"speed_trace {path} has {len(table)} rows and {table.shape[1]} columns; it needs "
            f"{clients} rows, one for each client, and 1 or 2 columns"
        )
    wrong = np.argwhere(~(np.isfinite(table) & (table > 0)))
    if len(wrong):
        row, column = wrong[0]
        raise UsageError(
            f"speed_trace {path} has {table[row, column]:g} for client {row}; give it a number "
            "above 0"
        )
    return list(table.T)


def _has_names(lines: Sequence[Sequence[str]]) -> bool:
    """Returns True if the first line of a CSV file has names instead of numbers."""
    if not lines:
        return False
    return not any(cell.strip().lstrip("+-.")[:1].isdigit() for cell in lines[0])
