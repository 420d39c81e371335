"""Settings of simulated time and stragglers, and the speeds that they select."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import transforms
from fedjax_pfl.core import batches, groups, jaxprs, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.example_noise import Fit, record_fits
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.setting import Limits, Setting
from fedjax_pfl.simulation.speeds import Speeds
from fedjax_pfl.transforms.privacy.client_level import is_affine
from fedjax_pfl.transforms.wrapping import RoundShapes, check_single_model, round_shapes

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
    fits = local_fits(algorithm, data)
    steps = [
        np.asarray(batches.local_steps(fit.training, federation.counts, fit.training.batch_size))
        for fit in fits
    ]
    return Speeds(
        steps=sum(steps, np.zeros(federation.clients, int)),
        step_seconds=median,
        spread=value_of("speed_spread"),
        bandwidth=bandwidth,
        deadline=value_of("deadline") or np.inf,
        free_rounds=0 if value_of("count_initial_download") else 1,
        partial_bytes=transfer_bytes(algorithm, data) if is_partial else None,
    )


def local_fits(algorithm: Algorithm, data: FederatedData) -> list[Fit]:
    """Returns the local trainings of a client in a round; with groups, of one of the first group.

    Trainings in a loop, or of several models at once, count once. Nothing is compiled.
    """

    def run(key: jax.Array, i: jax.Array, data: FederatedData) -> Any:
        state = groups.as_grouped(algorithm).init(key)
        member = groups.group_algorithms(algorithm)[0]
        ctx = ClientContext(i=i, data=None, t=i, key=key, max_steps=i)
        payload = member.send(state._replace(clients=()), ctx)
        client = trees.row(state.clients[0], i)
        return member.train(payload, client, ctx._replace(data=client_data(data, i)))

    with record_fits() as fits:
        jax.eval_shape(run, jax.random.key(0), jnp.int32(0), data)
    return fits


def check_partial(
    value_of: Callable[[str], Any],
    make_algorithm: Callable[[Mapping[str, Any]], Algorithm],
    data: FederatedData,
) -> None:
    """Raises UsageError if late=partial is not possible; arguments as for `client_speeds`."""
    if value_of("deadline") is None:
        raise UsageError("late=partial needs a deadline; set it, such as to 10")
    if value_of("privacy") != "none":
        raise UsageError("late=partial scales updates, which privacy does not cover; leave it out")
    if value_of("robust_rule") != "mean" or value_of("robust_mixing"):
        raise UsageError(
            "late=partial needs the mean of the uploads; leave robust_rule and robust_mixing out"
        )
    defaults = {name: setting.default_value for name, setting in transforms.SETTINGS.items()}
    plain = make_algorithm(defaults)
    check_single_model("late=partial", plain, data)
    if reason := _partial_reason(plain, data):
        raise UsageError(f"late=partial is not possible here: {reason}; use late=missing")


def _partial_reason(algorithm: Algorithm, data: FederatedData) -> str:
    """Returns why a method without transforms cannot use partial work, or "" if it can."""
    fits, shapes = local_fits(algorithm, data), round_shapes(algorithm, data)
    if len(fits) != 1 or fits[0].max_steps is None:
        return "the method trains more than once in a round, or not by local_training.fit"
    if fits[0].size < trees.size(shapes.upload["params"]):
        return "the method trains several models at once"
    if not is_affine(algorithm, shapes) or not _reads_weights(algorithm, shapes):
        return "the server's update is no mean of the uploads weighted by examples"
    return ""


def _reads_weights(algorithm: Algorithm, shapes: RoundShapes) -> bool:
    """Returns True if the new server state depends on the numbers of examples of a cohort."""
    state = shapes.state._replace(clients=())

    def receive(weights: jax.Array, state: State, upload: PyTree, payload: PyTree) -> PyTree:
        cohort = Cohort(
            ids=jnp.zeros(1, jnp.int32),
            arrived=jnp.ones(1, bool),
            weights=weights,
            payloads=trees.repeat(payload, 1),
            uploads=trees.repeat(upload, 1),
            t=0,
            key=jax.random.key(0),
        )
        return algorithm.receive(state, cohort)

    weights = jax.ShapeDtypeStruct((1,), jnp.float32)
    program = jax.make_jaxpr(receive)(weights, state, shapes.upload, shapes.payload)
    return jaxprs.prune(program.jaxpr)[1][0]


def transfer_bytes(algorithm: Algorithm, data: FederatedData) -> tuple[int, int]:
    """Returns the bytes that a client of a method without groups downloads and uploads.

    Raises UsageError if they depend on values of the upload.
    """
    shapes, counts = round_shapes(algorithm, data), list[Any]()

    def count(payload: PyTree, upload: PyTree) -> None:
        counts.extend(algorithm.traffic(payload, upload))

    jax.eval_shape(count, shapes.payload, shapes.upload)
    down, up = (sum(by_layer.values()) for by_layer in counts)
    if not isinstance(down, int) or not isinstance(up, int):
        raise UsageError("late=partial needs uploads of a constant size; use late=missing")
    return down, up


def read_trace(path: str, clients: int) -> list[np.ndarray]:
    """Returns the columns of a trace, float32 [N] each: seconds per step and, if any, bandwidth.

    A CSV file may have a row of names. Raises UsageError if the file is unreadable or has no row of
    one or two positive numbers for each client.
    """
    try:
        if path.endswith(".npy"):
            rows = np.load(path, allow_pickle=False)
        else:
            with Path(path).open(newline="", encoding="utf-8") as file:
                lines = [line for line in csv.reader(file) if line]
            rows = np.array([list(map(float, line)) for line in lines[_has_names(lines) :]])
        table = np.asarray(rows, np.float32).reshape(len(rows), -1)
    except OSError as error:
        raise UsageError(f"speed_trace {path} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, csv.Error):
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
    return bool(lines) and not any(cell.strip()[:1].isdigit() for cell in lines[0])
