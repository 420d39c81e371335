"""A run on real machines: rounds, evaluations, the run directory, and resuming after a crash.

An `Exchange` carries the bytes to the nodes.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from ml_collections import ConfigDict

from fedjax_pfl.core import trees
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import assembly, enrolment, own_state, schema, server
from fedjax_pfl.deploy.lines import one_line, to_stderr
from fedjax_pfl.deploy.programs import AtServer, Method
from fedjax_pfl.deploy.schema import TRAIN, InvalidError
from fedjax_pfl.deploy.server import Open, Server, Standing
from fedjax_pfl.report import run_reader
from fedjax_pfl.runs import checkpoints, progress, resume, run_directory, run_state
from fedjax_pfl.runs.build import Experiment
from fedjax_pfl.runs.run_state import SweepRun
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import forecast, ledger, metrics
from fedjax_pfl.simulation.records import Evaluation

FILE = "deployed.json"  # in the run directory: the run's name, its starts, and who its clients are
# Why a run cannot be made longer.
_FIXED = "its nodes keep the settings that they enrolled with"
WIRE = "wire.jsonl"  # a line per round: who was absent; bytes of messages beside the ledger's


class Exchange(Protocol):
    """Carries requests to clients and yields their answers as they come."""

    def ask(
        self, requests: Mapping[int, bytes], seconds: float | None
    ) -> Iterator[tuple[int, bytes]]:
        """Yields (client, answer) until all have answered or the time is up."""
        ...


class Waiting(NamedTuple):
    """How long the server waits, and for how many answers."""

    seconds: float = 600.0  # for the answers of a round
    least: int = 1  # answers that a round needs; with fewer it is asked for again
    tries: int = 10  # rounds that had too few, one after the other, after which the run stops


class Done(NamedTuple):
    """Results of a run at the server."""

    directory: Path
    metrics: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    ledger: ledger.Ledger
    standing: Standing
    resumed_at: int | None


Tell = Callable[[str], None]


def run(
    given: Mapping[str, Any],
    workdir: str | Path,
    exchange: Exchange,
    waiting: Waiting = Waiting(),  # noqa: B008 a tuple of numbers
    tell: Tell = to_stderr,
) -> Done:
    """Trains and evaluates a configuration with the clients that an exchange reaches.

    Args:
      tell: is given each line of the run's log, escaped, because some quote what a node has sent.
    """

    def say(line: str) -> None:
        tell(one_line(line))

    settings, words = assembly.complete(given)
    config = {**assembly.plain(settings, words), "deployed": True}
    if waiting.least > (settings.clients_per_round or settings.clients):
        raise UsageError(
            f"a round is to have {waiting.least} answers, and asks "
            f"{settings.clients_per_round or settings.clients} clients; want fewer"
        )
    sent = assembly.sent(given)
    with run_directory.claim(Path(workdir), config, lambda: _FIXED) as directory:
        with run_directory.writing(directory):
            run_directory.write_provenance(directory)
        store = checkpoints.open_store(directory / "checkpoints")
        known = _known(directory, saved=bool(store.steps()))
        federation = known.get("federation") or enrolment.enrol(
            known["run"],
            known["starts"],
            settings,
            sent,
            lambda requests: exchange.ask(requests, waiting.seconds),
            waiting.tries,
            say,
        )
        built, method, programs = _built(settings, words, federation)
        more = {"settings": sent, "federation": federation}
        one = Server(known["run"], known["starts"], programs, more)
        member = SweepRun("", settings, config, directory)
        member.store = store
        running = _Running(built, method, one, member, exchange, waiting, say)
        try:
            standing = jax.block_until_ready(running.resumed())
        except jax.errors.JaxRuntimeError as error:
            raise UsageError(
                f"no state can be made for what the nodes describe ({error})"
            ) from error
        _write(directory, {**known, "federation": federation})  # for which there is a state
        return running.all(standing)


def _built(
    settings: ConfigDict, words: configuration.Registry, federation: Mapping[str, Any]
) -> tuple[Experiment, Method, AtServer]:
    """Builds the server's side; UsageError if nodes have described what no method can have."""
    try:
        built, method = assembly.built(settings, words, federation)
        programs = AtServer(method, built.data, built.phases[0].inputs.cohort)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"no method can be built for what the nodes describe ({type(error).__name__}: {error})"
        ) from error
    state = sum(map(trees.leaf_bytes, jax.tree.leaves(programs.shapes[0].state)))
    messages = [(one.payload, one.answer.upload) for one in programs.shapes]
    of_client = max(sum(map(trees.leaf_bytes, jax.tree.leaves(one))) for one in messages)
    need = state + of_client * programs.cohort
    if lack := forecast.shortage(forecast.Requirement(need, 0, 0), forecast.capacity()):
        raise UsageError(
            f"the server needs {lack}, for what the nodes describe; take a smaller model, or see "
            "to the nodes' files"
        )
    return built, method, programs


def _known(directory: Path, *, saved: bool) -> dict[str, Any]:
    """Returns the run's name and how often it was started, this time included.

    Nodes bind themselves to a name when they enrol, so that it changes until all have enrolled.

    Args:
      saved: there are checkpoints, so that all have enrolled.
    """
    known = own_state.describe(directory / FILE, schema.DEPLOYED)
    if saved and "federation" not in known:
        raise UsageError(
            f"{directory / FILE} is missing or not whole, and nodes know this run by the name in "
            "it; bring it back from a copy, or choose another workdir"
        )
    if "federation" not in known:
        known["run"] = secrets.token_hex(8)
    known["starts"] = known.get("starts", -1) + 1
    _write(directory, known)
    return known


def _write(directory: Path, known: Mapping[str, Any]) -> None:
    with run_directory.writing(directory):
        own_state.whole(directory / FILE, json.dumps(known, indent=2).encode() + b"\n")


class _Running(NamedTuple):
    """Parts of a run; `member` holds its progress."""

    built: Experiment
    method: Method
    server: Server
    member: SweepRun
    exchange: Exchange
    waiting: Waiting
    tell: Tell

    def all(self, standing: Standing) -> Done:
        """Runs from a state to the end."""
        self.noted_until(self.member.at.round)
        member, end = self.member, self.built.phases[0].end
        run_state.sync_files(member)
        short = 0
        while member.at.round < end:
            before = member.at.round
            standing = self.round(standing)
            short = short + 1 if member.at.round == before else 0
            if short > self.waiting.tries:
                raise UsageError(
                    f"round {before + 1} had fewer than {self.waiting.least} answers "
                    f"{short} times; see to the nodes and give the same command again"
                )
        assert member.directory is not None
        rows = run_state.client_table(self.built, member.at)
        with member.writing():
            run_directory.write_clients(member.directory, rows)
            run_directory.write_traffic(member.directory, member.at.ledger)
            if not (member.directory / "report.html").exists():
                self.report(member.directory, rows)
        lines = list(member.at.metrics)
        return Done(member.directory, lines, rows, member.at.ledger, standing, member.resumed_at)

    def resumed(self) -> Standing:
        """Restores the newest intact checkpoint, or begins."""
        store, member = self.member.store, self.member
        assert store is not None
        run_state.reset(self.built, member)
        standing = server.begin(self.server)
        state = self.server.programs.shapes[0].state
        for step in store.steps():
            try:
                at, found, best = resume.restore(self.built, store, [state], step, member.config)
                settled = store.restore(step, {"settled": standing.settled})["settled"]
            except checkpoints.DamagedError as error:
                self.tell(f"The checkpoint of round {step} is damaged: {error}.")
                continue
            for later in store.steps():
                if later > step:
                    store.drop(later)
            member.at, member.best, member.resumed_at = at, best, at.round
            return Standing(found, settled)
        if store.steps():
            raise UsageError(
                f"all checkpoints in {store.folder} are damaged; bring one back from a copy, or "
                "delete the run directory to start again"
            )
        return standing

    def round(self, standing: Standing) -> Standing:
        """Runs one round with its evaluation, if due, and its checkpoint."""
        member, began = self.member, time.perf_counter()
        t, one = member.at.round, self.built.phases[0]
        opened = server.open_round(self.server, standing, t)
        came, moved = self.collected(opened, server.take)
        fine = sum(answer.fine for answer in came.values())
        if fine < self.waiting.least:
            self.tell(
                f"round {t + 1}: {fine} of {len(opened.requests)} answers count, and it needs "
                f"{self.waiting.least}; it is asked for again"
            )
            return standing
        standing, logs = server.close_round(self.server, standing, opened, came)
        for line in metrics.rejections(logs, t, 1):
            self.tell(line)
        free = 1 if t == 0 and not one.config.count_initial_download else 0
        before = member.at.ledger
        member.at = member.at._replace(
            round=t + 1,
            ledger=ledger.add(before, logs, 1, free),
            pending=metrics.gather(member.at.pending, logs, 1),
        )
        trained = time.perf_counter()
        due = (t + 1) % one.config.eval_every == 0 or t + 1 == one.end
        scores = self.scored(standing, t + 1, last=t + 1 == one.end) if due else None
        ended = time.perf_counter()
        member.at = member.at._replace(
            seconds=member.at.seconds + ended - began,
            evaluate_seconds=member.at.evaluate_seconds + ended - trained,
        )
        if scores is not None:
            self.evaluated(standing, scores)
        after = member.at.ledger
        self.noted(
            round=t + 1,
            seconds=round(trained - began, 3),
            evaluate_seconds=round(ended - trained, 3),
            answers=fine,
            absent=sorted(set(opened.requests) - {i for i in came if came[i].fine}),
            ledger_down=after.total_down - before.total_down,
            ledger_up=after.total_up - before.total_up,
            messages_down=moved[0],
            messages_up=moved[1],
        )
        self.saved(standing)
        return standing

    def collected(
        self, opened: Open, take: Callable[..., Any]
    ) -> tuple[dict[int, Any], tuple[int, int]]:
        """Returns by client the answers that came in time and can be read, and the bytes moved."""
        came: dict[int, Any] = {}
        refused, up = set[int](), 0
        what = f"{opened.kind}, round {opened.round + (opened.kind == TRAIN)}"
        for i, content in self.exchange.ask(opened.requests, self.waiting.seconds):
            up += len(content)
            try:
                if i not in opened.requests or i in came:
                    raise InvalidError("it was not asked, or has answered already")
                came[i] = take(self.server, opened, i, content)
            except InvalidError as error:
                refused.add(i)
                self.tell(f"{what}: client {i}: {error}")
        for i in sorted(set(opened.requests) - set(came) - refused):
            self.tell(f"{what}: client {i} is absent")
        return came, (sum(map(len, opened.requests.values())), up)

    def scored(self, standing: Standing, t: int, *, last: bool) -> Evaluation:
        """Evaluates all clients; a client without an answer has no scores."""
        everyone = range(self.method.federation.clients)
        opened = server.open_evaluation(self.server, standing, t, everyone, last=last)
        came, _ = self.collected(opened, server.take_scores)
        return server.scores_of_all(self.server, came)

    def evaluated(self, standing: Standing, scores: Evaluation) -> None:
        """Writes and tells an evaluation's line."""
        member = self.member
        shown = assembly.observed(self.method, standing.state)
        line = run_state.record_evaluation(self.built, member, scores, standing.state, shown)
        for remark in run_state.new_warnings(member):
            self.tell(f"round {member.at.round}: {remark}")
        run_state.append_evaluation(member, shown, line)
        metric = self.built.federation.task.metrics[0]
        self.tell(progress.evaluation_line(metric, [line], self.built.phases[0].end))

    def saved(self, standing: Standing) -> None:
        """Saves a checkpoint after every round, before clients are told that it has counted."""
        member, began = self.member, time.perf_counter()
        assert member.store is not None
        trees = {"state": standing.state, "settled": standing.settled}
        if member.best is not None:
            trees["best"] = member.best
        with member.writing():
            facts = resume.to_facts(member.at) | {"config": member.config}
            member.store.save(member.at.round, trees, facts)
        took = time.perf_counter() - began
        total = member.at.checkpoint_seconds + took
        member.at = member.at._replace(checkpoint_seconds=total)

    def noted(self, **line: Any) -> None:
        """Writes the absent clients of a round, and the bytes of its messages."""
        assert self.member.directory is not None
        with self.member.writing(), open(self.member.directory / WIRE, "a") as file:
            file.write(json.dumps(line) + "\n")

    def noted_until(self, t: int) -> None:
        """Removes lines of rounds that were not saved and will run again."""
        assert self.member.directory is not None
        path = self.member.directory / WIRE
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        with self.member.writing():
            own_state.whole(path, b"".join(lines[:t]))

    def report(self, directory: Path, rows: list[dict[str, Any]]) -> None:
        """Writes the report; imports drawing code only here."""
        from fedjax_pfl.report import method_figures, page

        member = self.member
        read = run_reader.Run(
            directory,
            member.config,
            list(member.at.metrics),
            rows,
            run_directory.traffic(member.at.ledger),
            run_reader.read_provenance(directory),
        )
        layers = list(member.at.ledger.down)
        pictures = method_figures.draw(
            member.config, member.observations, layers, member.at.metrics
        )
        page.write(read, pictures)
