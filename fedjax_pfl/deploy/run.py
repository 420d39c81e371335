"""Runs a method on several machines: rounds, evaluations, run directory, and resuming.

An `Exchange` carries the bytes between the server and the nodes.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import assembly, enrolment, schema, server, storage
from fedjax_pfl.deploy.exchange import Exchange, Waiting
from fedjax_pfl.deploy.lines import one_line, to_stderr
from fedjax_pfl.deploy.programs import Method
from fedjax_pfl.deploy.schema import TRAIN, InvalidError
from fedjax_pfl.deploy.server import PendingRequests, Server, ServerState
from fedjax_pfl.report import run_reader
from fedjax_pfl.runs import checkpoints, progress, resume, run_directory, run_state
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.runs.run_state import SweepRun
from fedjax_pfl.simulation import ledger, summaries
from fedjax_pfl.simulation.records import Evaluation

DEPLOYED_FILE = "deployed.json"  # name of the run, number of its last start and federation
WIRE_FILE = "wire.jsonl"  # absent and rejected clients, message bytes; one line per round
# Only the nodes know which examples they have.
_NODES_DATA = {"dataset": "data of the nodes", "partition": "per-node"}
_LENGTH_IS_FIXED = "its nodes keep the settings that they enrolled with"


class RunResult(NamedTuple):
    """Results of a finished run."""

    directory: Path  # run directory
    metrics: list[dict[str, Any]]  # one entry per evaluation
    clients: list[dict[str, Any]]  # one row per client, as in clients.csv
    ledger: ledger.Ledger  # bytes and outcomes of updates by client
    server_state: ServerState  # after the last round
    resumed_at: int | None  # number of rounds done when the run was last resumed; None: never


def run(
    user_settings: Mapping[str, Any],
    workdir: str | Path,
    exchange: Exchange,
    waiting: Waiting = Waiting(),  # noqa: B008 a tuple of numbers
    log: Callable[[str], None] = to_stderr,
) -> RunResult:
    """Trains and evaluates a configuration with the clients that an exchange reaches.

    Args:
      user_settings: Settings as the user gave them.
      workdir: Run directory; a run that was stopped there is resumed.
      exchange: Connection to the clients.
      waiting: Limits on waiting for clients; UsageError if a round has too few clients for them.
      log: Called with each line of the run's log. Lines are escaped: some quote received text.
    """

    def log_line(line: str) -> None:
        log(one_line(line))

    settings, registry = assembly.complete(user_settings)
    config = {**assembly.to_plain(settings, registry), **_NODES_DATA, "deployed": True}
    cohort = settings.clients_per_round or settings.clients - settings.held_out
    if waiting.min_answers > cohort:
        raise UsageError(
            f"min_answers is {waiting.min_answers}, and a round has only {cohort} clients; lower it"
        )
    node_settings = assembly.node_settings(user_settings)
    with run_directory.claim(Path(workdir), config, lambda: _LENGTH_IS_FIXED) as directory:
        with run_directory.writing(directory):
            run_directory.write_provenance(directory)
        store = checkpoints.open_store(directory / "checkpoints")
        start_record = _read_start_record(directory, saved=bool(store.steps()))
        federation = start_record.get("federation") or enrolment.enrol(
            start_record["run"],
            start_record["start"],
            settings,
            node_settings,
            lambda requests: exchange.ask(requests, waiting.seconds),
            lambda clients: exchange.wait_for_return(clients, waiting.seconds),
            waiting.tries,
            log_line,
        )
        experiment, method, programs = assembly.build_server(settings, registry, federation)
        running = _Run(
            experiment=experiment,
            method=method,
            server=Server(
                run=start_record["run"],
                start=start_record["start"],
                programs=programs,
                request_facts={"settings": node_settings, "federation": federation},
            ),
            sweep_run=SweepRun("", settings, config, directory=directory, store=store),
            directory=directory,
            store=store,
            exchange=exchange,
            waiting=waiting,
            log=log_line,
        )
        try:
            server_state = jax.block_until_ready(running.restore())
        except jax.errors.JaxRuntimeError as error:
            raise UsageError(
                f"no state can be initialised for the data that the nodes describe ({error})"
            ) from error
        # Only now: a federation for which no state fits must not be stored.
        _write_start_record(directory, {**start_record, "federation": federation})
        try:
            return running.run_to_end(server_state)
        finally:
            running.sweep_run.close_loggers()


def _read_start_record(directory: Path, *, saved: bool) -> dict[str, Any]:
    """Reads and updates the run's `deployed.json`: `run`, `start` and perhaps `federation`.

    `start` rises with each start, because nodes refuse requests of an earlier one. It is the time
    in seconds, so it rises also if the file is restored from a backup. A run gets a new name at
    each start until all nodes have enrolled, because nodes refuse a changed enrolment under the
    same name. With `saved` the run has checkpoints, so all nodes must have enrolled.
    """
    start_record = storage.read_json(directory / DEPLOYED_FILE, schema.DEPLOYED)
    if saved and "federation" not in start_record:
        raise UsageError(
            f"{directory / DEPLOYED_FILE} is missing or incomplete, and nodes only accept the run "
            "name in it; restore it from a backup, or use another workdir"
        )
    if "federation" not in start_record:
        start_record["run"] = secrets.token_hex(8)
    start_record["start"] = max(start_record.get("start", -1) + 1, int(time.time()))
    _write_start_record(directory, start_record)
    return start_record


def _write_start_record(directory: Path, start_record: Mapping[str, Any]) -> None:
    """Writes the run's `deployed.json`."""
    with run_directory.writing(directory):
        storage.write_json(directory / DEPLOYED_FILE, start_record, indent=2)


class _Run(NamedTuple):
    """A run in progress; `sweep_run` holds its position, metrics and ledger."""

    experiment: Experiment  # record with one phase, which reports read
    method: Method
    server: Server
    sweep_run: SweepRun
    directory: Path  # run directory
    store: checkpoints.Store  # checkpoints
    exchange: Exchange
    waiting: Waiting
    log: Callable[[str], None]  # called with each line

    def run_to_end(self, server_state: ServerState) -> RunResult:
        """Runs the rounds left and writes the results; UsageError if too few clients respond."""
        self.truncate_wire_file(self.sweep_run.at.round)
        sweep_run, end, failed_attempts = self.sweep_run, self.experiment.phases[0].end, 0
        run_state.sync_files(sweep_run)
        if sweep_run.at.round >= end:
            self.log(f"This run was finished at round {end}; no node is asked")
        elif sweep_run.resumed_at is not None:
            self.log(f"The run is resumed at round {sweep_run.at.round}")
        while sweep_run.at.round < end:
            round_before, started = sweep_run.at.round, time.monotonic()
            server_state = self.run_round(server_state)
            failed_attempts = failed_attempts + 1 if sweep_run.at.round == round_before else 0
            if failed_attempts > self.waiting.tries:
                raise UsageError(
                    f"round {round_before + 1} had fewer than {self.waiting.min_answers} accepted "
                    f"responses {failed_attempts} times; check the nodes, then run the same command"
                )
            if failed_attempts:
                cohort = server.sample(self.server, round_before)
                self.wait_for_return(cohort, started)
        rows = run_state.client_rows(self.experiment, sweep_run.at)
        counts = self.server.request_facts["federation"]["counts"]
        for row in rows:  # An absent client has no scores, but it may have test examples.
            row["test_examples"] = counts[row["client"]]["test"]
        with sweep_run.writing():
            run_directory.write_clients(self.directory, rows)
            run_directory.write_traffic(self.directory, sweep_run.at.ledger)
            if not (self.directory / "report.html").exists():
                self.write_report(rows)
        return RunResult(
            directory=self.directory,
            metrics=list(sweep_run.at.metrics),
            clients=rows,
            ledger=sweep_run.at.ledger,
            server_state=server_state,
            resumed_at=sweep_run.resumed_at,
        )

    def restore(self) -> ServerState:
        """Restores the newest intact checkpoint, or initialises; UsageError if all are damaged."""
        store, sweep_run = self.store, self.sweep_run
        run_state.reset(self.experiment, sweep_run)
        server_state = server.initial_state(self.server)
        template = self.server.programs.shapes[0].state
        for step in store.steps():
            try:
                at, restored, best = resume.restore(
                    self.experiment, store, [template], step, sweep_run.config
                )
                settled = store.restore(step, {"settled": server_state.settled})["settled"]
            except checkpoints.DamagedError as error:
                self.log(f"The checkpoint of round {step} is damaged: {error}.")
                continue
            for later_step in [saved for saved in store.steps() if saved > step]:
                store.drop(later_step)
            sweep_run.at, sweep_run.best, sweep_run.resumed_at = at, best, at.round
            return ServerState(restored, settled)
        if store.steps():
            raise UsageError(
                f"all checkpoints in {store.folder} are damaged; restore one from a backup, or "
                "delete the run directory to restart"
            )
        return server_state

    def run_round(self, server_state: ServerState) -> ServerState:
        """Runs one round, evaluates if that is due, and saves a checkpoint.

        Returns the same state if too few responses were accepted.
        """
        sweep_run, started = self.sweep_run, time.perf_counter()
        t, phase = sweep_run.at.round, self.experiment.phases[0]
        pending = server.open_round(self.server, server_state, t)
        updates, message_bytes = self.collect(pending, server.read_update)
        accepted = sum(update.accepted for update in updates.values())
        server.require_updates(pending, updates, self.waiting.min_answers)
        if accepted < self.waiting.min_answers:
            self.log(
                f"round {t + 1}: accepted {accepted} of {len(pending.requests)} responses, needs "
                f"{self.waiting.min_answers}; repeating the round"
            )
            return server_state
        new_state, logs = server.close_round(self.server, server_state, pending, updates)
        if accepted and new_state is server_state:  # asked again, nodes would send the same
            raise UsageError(
                f"the updates of round {t + 1} are finite, but their mean is not; start again with "
                "max_update_norm or a smaller learning_rate, and another workdir"
            )
        server_state = new_state
        for line in summaries.rejections(logs, t, 1):
            self.log(line)
        free = 1 if t == 0 and not phase.config.count_initial_download else 0
        ledger_before = sweep_run.at.ledger
        sweep_run.at = sweep_run.at._replace(
            round=t + 1,
            ledger=ledger.add(ledger_before, logs, 1, free),
            pending=summaries.gather(sweep_run.at.pending, logs, 1, phase.inputs.is_attacker),
        )
        trained_at = time.perf_counter()
        is_due = (t + 1) % phase.config.eval_every == 0 or t + 1 == phase.end
        scores = self.evaluate(server_state, t + 1, last=t + 1 == phase.end) if is_due else None
        finished = time.perf_counter()
        sweep_run.at = sweep_run.at._replace(
            seconds=sweep_run.at.seconds + finished - started,
            evaluate_seconds=sweep_run.at.evaluate_seconds + finished - trained_at,
        )
        if scores is not None:
            self.record_evaluation(server_state, scores)
        ledger_after = sweep_run.at.ledger
        self.append_wire_line(
            round=t + 1,
            seconds=round(trained_at - started, 3),
            evaluate_seconds=round(finished - trained_at, 3),
            answers=accepted,
            absent=sorted(set(pending.requests) - set(updates)),
            rejected=[i for i, update in sorted(updates.items()) if not update.accepted],
            ledger_down=ledger_after.total_down - ledger_before.total_down,
            ledger_up=ledger_after.total_up - ledger_before.total_up,
            messages_down=message_bytes[0],
            messages_up=message_bytes[1],
        )
        self.save(server_state)
        return server_state

    def collect(
        self, pending: PendingRequests, read_response: Callable[..., Any]
    ) -> tuple[dict[int, Any], tuple[int, int]]:
        """Sends requests and decodes the responses with `read_update` or `read_scores` of `server`.

        Returns the decoded responses by client id, and the bytes of all requests and responses.
        """
        responses: dict[int, Any] = {}
        refused, bytes_up = set[int](), 0
        stage = f"{pending.kind}, round {pending.round + (pending.kind == TRAIN)}"
        for i, content in self.exchange.ask(pending.requests, self.waiting.seconds):
            bytes_up += len(content)
            try:
                if i not in pending.requests or i in responses:
                    raise InvalidError("it got no request, or has already responded")
                responses[i] = read_response(self.server, pending, i, content)
            except InvalidError as error:
                refused.add(i)
                self.log(f"{stage}: client {i}: {error}")
        for i in sorted(set(pending.requests) - set(responses) - refused):
            self.log(f"{stage}: client {i} is absent")
        return responses, (sum(map(len, pending.requests.values())), bytes_up)

    def wait_for_return(self, clients: Iterable[int], started: float) -> None:
        """Waits for an offline client until `waiting.seconds` after `started`, monotonic time."""
        self.exchange.wait_for_return(clients, started + self.waiting.seconds - time.monotonic())

    def evaluate(self, server_state: ServerState, t: int, *, last: bool) -> Evaluation:
        """Evaluates all clients after `t` rounds; absent clients have no scores.

        With `last` clients save their models, so absent ones get their request a second time.
        """
        client_ids, started = range(self.method.federation.clients), time.monotonic()
        pending = server.open_evaluation(self.server, server_state, t, client_ids, last=last)
        responses, _ = self.collect(pending, server.read_scores)
        if last and len(responses) < len(client_ids):
            absent = {i: pending.requests[i] for i in client_ids if i not in responses}
            self.wait_for_return(absent, started)
            again, _ = self.collect(pending._replace(requests=absent), server.read_scores)
            responses |= again
        return server.stack_scores(self.server, responses)

    def record_evaluation(self, server_state: ServerState, scores: Evaluation) -> None:
        """Writes an evaluation to the run directory and the log."""
        sweep_run = self.sweep_run
        observations = assembly.observe_server_state(self.method, server_state.state)
        line = run_state.record_evaluation(
            self.experiment,
            sweep_run,
            scores,
            server_state.state,
            observations,
            may_be_best=server.is_complete(self.method.federation, scores),
        )
        for remark in run_state.new_warnings(sweep_run):
            self.log(f"round {sweep_run.at.round}: {remark}")
        run_state.append_evaluation(sweep_run, observations, line)
        metric = self.experiment.federation.task.metrics[0]
        self.log(progress.evaluation_line(metric, [line], self.experiment.phases[0].end))

    def save(self, server_state: ServerState) -> None:
        """Saves a checkpoint: the server's state, the progress, the metrics and the ledger."""
        sweep_run, started = self.sweep_run, time.perf_counter()
        arrays = {"state": server_state.state, "settled": server_state.settled}
        if sweep_run.best is not None:
            arrays["best"] = sweep_run.best
        with sweep_run.writing():
            facts = resume.to_facts(sweep_run.at) | {"config": sweep_run.config}
            self.store.save(sweep_run.at.round, arrays, facts)
        total = sweep_run.at.checkpoint_seconds + time.perf_counter() - started
        sweep_run.at = sweep_run.at._replace(checkpoint_seconds=total)

    def append_wire_line(self, **line: Any) -> None:
        """Appends the line of a round to `wire.jsonl`."""
        with self.sweep_run.writing(), open(self.directory / WIRE_FILE, "a") as file:
            file.write(json.dumps(line) + "\n")

    def truncate_wire_file(self, t: int) -> None:
        """Keeps the first `t` lines of `wire.jsonl`; later rounds will run again."""
        path = self.directory / WIRE_FILE
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        with self.sweep_run.writing():
            storage.write_atomic(path, b"".join(lines[:t]))

    def write_report(self, rows: list[dict[str, Any]]) -> None:
        """Writes the report page to the run directory; `rows` has a row of results per client."""
        from fedjax_pfl.report import method_figures, page

        at, config = self.sweep_run.at, self.sweep_run.config
        run_record = run_reader.Run(
            directory=self.directory,
            config=config,
            metrics=list(at.metrics),
            clients=rows,
            traffic=run_directory.traffic(at.ledger),
            provenance=run_reader.read_provenance(self.directory),
            examples=run_reader.examples_of(self.directory, config),
        )
        observations, layers = self.sweep_run.observations, list(at.ledger.down)
        figures = method_figures.draw(config, observations, layers, at.metrics)
        page.write(run_record, figures)
