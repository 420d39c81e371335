"""The training loop: a method and partitioned data, run round by round.

    simulation = Simulation(method, data, clients_per_round=10)
    state = simulation.init()
    for t in range(20):
        state, log = simulation.run_round(state, t)
    scores = simulation.evaluate(state, 20)

`Simulation` holds compiled functions and no state: results depend on the arguments alone.
"""

import operator
from collections import namedtuple
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, PyTree, State
from fedjax_pfl.core.arguments import check_arguments
from fedjax_pfl.core.errors import UsageError, require, require_above, require_count
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.groups import group_algorithms
from fedjax_pfl.core.randomness import PERSONAL, stage_key
from fedjax_pfl.core.shape_check import check_outputs, check_shapes
from fedjax_pfl.core.task import Task, check_task
from fedjax_pfl.core.trees import row
from fedjax_pfl.simulation import execution_plan, records, summaries
from fedjax_pfl.simulation.on_device import DeviceProgram
from fedjax_pfl.simulation.programs import OFF_DEVICE, STORES, make_program
from fedjax_pfl.simulation.rounds import round_functions
from fedjax_pfl.simulation.sampling import SAMPLINGS
from fedjax_pfl.simulation.saving import check_not_used_up
from fedjax_pfl.simulation.speeds import method_speeds
from fedjax_pfl.simulation.spread import is_on_mesh
from fedjax_pfl.simulation.stores import ClientStore, to_arrays
from fedjax_pfl.simulation.streamed import StreamedProgram


class RoundLog(NamedTuple):
    """Record of one round. Arrays have one entry per sampled client."""

    ids: np.ndarray  # int32 [K]: client ids
    arrived: np.ndarray  # bool [K]: the server used the client's update
    rejected: np.ndarray  # bool [K]: the update was not finite, or too large
    metrics: dict[str, np.ndarray]  # training metrics, float [K] each; NaN without an update
    bytes_down_by_layer: dict[str, int]  # sum over the clients, by layer
    bytes_up_by_layer: dict[str, int]  # uploaded, otherwise the same
    seconds: float | None = None  # simulated seconds of the round; None without `step_seconds`
    late: np.ndarray | None = None  # bool [K]: missed the deadline; None without `step_seconds`

    @property
    def loss(self) -> float:
        """Mean training loss over the clients whose update arrived; NaN if there is none."""
        losses = self.metrics["loss"][self.arrived]
        return float(losses.mean()) if len(losses) else float("nan")

    @property
    def bytes_down(self) -> int:
        """Bytes that all clients downloaded."""
        return sum(self.bytes_down_by_layer.values())

    @property
    def bytes_up(self) -> int:
        """Bytes that all clients uploaded."""
        return sum(self.bytes_up_by_layer.values())


class Evaluation(NamedTuple):
    """Scores of every client's personal model.

    Each field is a record with one array of shape [N] per metric, `loss` and `examples`. Entries
    are NaN for clients without examples.
    """

    before: Any  # scores on test examples of the model as it is served
    after: Any  # the same after one more local training, or None
    validation: Any  # scores on validation examples of the served model


class Simulation:
    """Compiled rounds of one method on the clients of one partition.

    Nothing is compiled before the first call.

    Args:
      method: From a factory such as `fedjax_pfl.fedper`, or your own `Algorithm`.
      data: From `fedjax_pfl.partition`.
      clients_per_round: Number of clients sampled in each round. Default: all.
      sampling: "random", or "cyclic": all clients in turn, in an order drawn once.
      seed: Decides everything random in training, an integer from 0 to 2^32 - 1.
      dropout: Probability that a sampled client never returns its update.
      max_update_norm: Updates with a larger norm are rejected. Default: updates that are not
        finite, or whose squared norm is not.
      step_seconds: Simulated seconds of a local step: a number, or one per client, [N]. Default: no
        simulated time.
      bandwidth: Bytes per second in each direction, likewise. Default: transfers take no time.
      deadline: Simulated seconds of a round after which the server waits for no client; later
        updates are missing. Default: it waits for the last client.
      evaluate_after: Whether `evaluate` also scores each model after one more local training.
      store: Where client state is kept: "device", "sharded" over devices, "host" memory or "disk".
      folder: Folder for store="disk". Default: a temporary one.
      devices: Number of devices. Default: all; on a CPU at most one per sampled client.
      chunk: Clients that are trained at the same time on a device. Default: 1 on a CPU, else all.
    """

    @check_arguments
    def __init__(
        self,
        method: Algorithm,
        data: Any,
        *,
        clients_per_round: int | None = None,
        sampling: str = "random",
        seed: int = 0,
        dropout: float = 0.0,
        max_update_norm: float | None = None,
        step_seconds: Any = None,
        bandwidth: Any = None,
        deadline: float | None = None,
        evaluate_after: bool = True,
        store: str = "device",
        folder: str | Path | None = None,
        devices: int | None = None,
        chunk: int | None = None,
    ) -> None:
        _check(method, data, store, sampling)
        y = data.examples.y
        outputs = jax.ShapeDtypeStruct((2, *data.federation.output_shape), "float32")
        labels = jax.ShapeDtypeStruct((2, *y.shape[1:]), y.dtype)
        check_task("the task", data.federation.task, outputs, labels)
        require_count("clients_per_round", clients_per_round)
        is_seed = isinstance(seed, Integral) and 0 <= seed < 2**32  # JAX drops higher bits
        require(is_seed, f"seed is {seed!r}; it must be an integer from 0 to 2^32 - 1")
        require_count("devices", devices)
        require_count("chunk", chunk)
        is_share = isinstance(dropout, Real) and 0 <= dropout <= 1
        require(is_share, f"dropout is {dropout!r}; it is a probability, 0 to 1")
        require_above("max_update_norm", max_update_norm, 0)
        require(folder is None or store == "disk", "folder is for store='disk'; leave it out")
        is_path = isinstance(folder, str | PathLike)
        is_folder = folder is None or (is_path and Path(folder).is_dir())
        require(is_folder, f"folder {folder} does not exist; create it, or leave folder out")
        self.method = method
        self.examples: FederatedData = data.examples
        self.federation: Federation = data.federation
        check_outputs("the method", method, self.federation, self.examples)
        if store in OFF_DEVICE and method.offload:  # it may read these rows by few functions only
            check_shapes("the method", method, self.federation, self.examples)
        clients = self.federation.clients
        active = int(self.federation.active.sum())
        cohort = active if clients_per_round is None else clients_per_round
        mesh = execution_plan.mesh(devices, cohort, several=False)
        self._settings: dict[str, Any] = {
            "cohort": cohort,
            "sampling": sampling,
            "dropout": dropout,
            "client_speeds": method_speeds(
                method,
                self.federation,
                self.examples,
                step_seconds=step_seconds,
                bandwidth=bandwidth,
                deadline=deadline,
            ),
            "max_update_norm": max_update_norm,
            "evaluate_after": evaluate_after,
            "chunk": chunk or execution_plan.default_chunk(clients),
            "mesh": mesh,
            "by_client": store == "sharded",
        }
        self._key = jax.random.key(seed)
        self._store = store
        self._folder = None if folder is None else Path(folder)
        self._programs: dict[int, DeviceProgram | StreamedProgram] = {}
        self._program(1)  # reports mistakes in the arguments now

    def __repr__(self) -> str:
        """Returns one line on the size of the simulation."""
        clients, cohort = self.federation.clients, self._settings["cohort"]
        return f"Simulation({clients} clients, {cohort} per round, store={self._store!r})"

    def init(self, start: State | None = None) -> State:
        """Returns the initial state, or one that starts from the end of another phase."""
        return self._program(1).init(start and self._from_any_store(start))

    def run_round(self, state: State, t: int) -> tuple[State, RoundLog]:
        """Runs round `t` and uses up `state`. Returns the next state and the log of the round.

        `jax.device_get(state)` is a copy to keep. With store="host" or "disk", keep a state with
        `fedjax_pfl.save`.
        """
        state, logs = self.run_rounds(state, t, 1)
        return state, logs[0]

    def run_rounds(self, state: State, t: int, n: int) -> tuple[State, list[RoundLog]]:
        """Runs rounds t to t + n - 1 in one compiled call. Returns one log per round.

        Uses up `state`, as `run_round` does.
        """
        require_count("n", n)
        t, program = _round_number(t), self._program(n)
        state, logs = program.run(program.enter(self._from_any_store(state)), t, n)
        return state, [round_log(logs, r) for r in range(n)]

    def evaluate(self, state: State, t: int) -> Evaluation:
        """Scores every client's personal model as of round `t`."""
        t, program, task = _round_number(t), self._program(1), self.federation.task
        scores = program.evaluate(program.enter(self._from_any_store(state)), t)
        return Evaluation(
            before=_scores(scores.before, task),
            after=None if scores.after is None else _scores(scores.after, task),
            validation=_scores(scores.validation, task),
        )

    def observe(self, state: State) -> dict[str, np.ndarray]:
        """Returns what the method shows of its state, such as pFedLA's averaging weights."""
        program = self._program(1)
        return program.observe(self.method, program.enter(self._from_any_store(state)))

    def personal_model(self, state: State, client: int, t: int = 0) -> PyTree:
        """Returns the variables of the personalised model of a client in round `t`.

        Raises UsageError unless the store is "device".
        """
        if self._store != "device":
            raise UsageError(f"personal_model needs store='device', and store is {self._store!r}")
        if not 0 <= client < self.federation.clients:
            raise UsageError(f"client is {client}; choose 0 to {self.federation.clients - 1}")
        t, program = _round_number(t), self._program(1)
        state = program.enter(self._from_any_store(state))
        has_groups = isinstance(self.method.send, tuple)
        group = int(self.federation.groups[client]) if has_groups else 0
        client_states = state.clients[group] if has_groups else state.clients
        ctx = ClientContext(
            i=client,
            data=client_data(program.data, client),
            t=t,
            key=stage_key(self._key, PERSONAL, t, client),
        )
        member = group_algorithms(self.method)[group]
        return member.personalize(state._replace(clients=()), row(client_states, client), ctx)

    def _from_any_store(self, state: State) -> State:
        """Returns a state of a simulation with any store in a form that this store accepts."""
        check_not_used_up(state)
        if isinstance(state.clients, ClientStore):
            return state if self._store in OFF_DEVICE else to_arrays(state)
        is_spread = self._store == "sharded" and is_on_mesh(state, self._settings["mesh"])
        return state if is_spread else to_arrays(state)

    def _program(self, rounds: int) -> DeviceProgram | StreamedProgram:
        """Returns the program for up to `rounds` rounds in one call, made at its first use."""
        if self._store in OFF_DEVICE:
            rounds = 1  # such programs run one round per call
        if rounds not in self._programs:
            # Examples that are on the devices already are not copied again.
            earlier = next(iter(self._programs.values()), None)
            self._programs[rounds] = make_program(
                round_functions(self.method, self.federation, max_rounds=rounds, **self._settings),
                self._key,
                self.examples if earlier is None else earlier.data,
                store=self._store,
                folder=self._folder,
            )
        return self._programs[rounds]


def _round_number(t: Any) -> int:
    """Returns the number of a round as an int; raises UsageError if it is none."""
    try:
        number = operator.index(t)
    except TypeError:
        number = -1
    require(number >= 0, f"t is {t!r}; it must be the number of a round: 0, 1, ...")
    return number


def _check(method: Any, data: Any, store: str, sampling: str) -> None:
    """Raises UsageError for a method that is no `Algorithm`, and for data without a federation.

    Raises it also for an unknown store or sampling.
    """
    if not isinstance(method, Algorithm):
        raise UsageError(
            f"Simulation takes an Algorithm, got {type(method).__name__}; call the method's "
            "factory first, as in fedavg(model, training, data.federation)"
        )
    if not (hasattr(data, "examples") and hasattr(data, "federation")):
        raise UsageError(
            f"Simulation takes PartitionedData, got {type(data).__name__}; make it with "
            "partition(dataset, NAME, clients=...)"
        )
    if store not in STORES:
        raise UsageError(f"store is {store!r}; choose {', '.join(STORES)}")
    if sampling not in SAMPLINGS:
        raise UsageError(f"sampling is {sampling!r}; choose {' or '.join(SAMPLINGS)}")


def round_log(logs: Sequence[records.Log], r: int, *, is_free_download: bool = False) -> RoundLog:
    """Returns the log of one round over all architecture groups, ordered by client id.

    Args:
      logs: One log per group, arrays [rounds, K].
      r: Index of the round in these arrays.
      is_free_download: Whether the round's downloads are not counted.
    """
    parts = [jax.tree.map(lambda leaf: np.asarray(leaf)[r], log) for log in logs]
    present = np.concatenate([part.present for part in parts])
    ids = np.concatenate([part.ids for part in parts])[present]
    order = np.argsort(ids, kind="stable")

    def joined(name: str) -> np.ndarray:
        """Returns the field `name` for all sampled clients."""
        return np.concatenate([getattr(part, name) for part in parts])[present][order]

    arrived = joined("arrived")
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    values = {
        name: np.concatenate(
            [part.metrics.get(name, np.full(len(part.ids), np.nan)) for part in parts]
        )[present][order]
        for name in names
    }
    bytes_down = _bytes([part.down for part in parts])
    return RoundLog(
        ids=ids[order],
        arrived=arrived,
        rejected=joined("rejected"),
        metrics={name: np.where(arrived, column, np.nan) for name, column in values.items()},
        bytes_down_by_layer=dict.fromkeys(bytes_down, 0) if is_free_download else bytes_down,
        bytes_up_by_layer=_bytes([part.up for part in parts]),
        seconds=None if parts[0].seconds is None else float(max(p.seconds.max() for p in parts)),
        late=None if parts[0].late is None else joined("late"),
    )


def _bytes(bills: Sequence[Mapping[str, np.ndarray]]) -> dict[str, int]:
    """Returns the bytes of every layer, summed over clients in 64 bits.

    Each of the `bills`, one per architecture group, has arrays [K] by name of the layer.
    """
    total: dict[str, int] = {}
    for bill in bills:
        for layer, amounts in bill.items():
            total[layer] = total.get(layer, 0) + int(np.sum(amounts, dtype=np.int64))
    return total


def _scores(scores: Any, task: Task) -> Any:
    """Returns a namedtuple with arrays [N]: the task's metrics, `loss` and `examples`.

    `scores` has the sums over each client's examples.
    """
    columns = {**summaries.per_client(scores, task), "examples": np.asarray(scores.examples)}
    record: Any = namedtuple("Scores", list(columns))  # type: ignore[misc]
    return record(**columns)
