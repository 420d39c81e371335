"""The server's side of a round: requests, answers, and the new state.

It computes a round as the simulation does, with the clients' part on other machines. A client whose
answer is late or wrong is absent, like a client that `dropout` removes from a simulation.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.core.local_training import Scores
from fedjax_pfl.core.task import Task
from fedjax_pfl.deploy import schema, wire
from fedjax_pfl.deploy.own_state import BEGUN
from fedjax_pfl.deploy.programs import AtServer
from fedjax_pfl.deploy.schema import EVALUATE, TRAIN, InvalidError
from fedjax_pfl.simulation import metrics as numbers
from fedjax_pfl.simulation.records import Evaluation, Log

_SLACK = 1_000_000  # bytes of an answer besides its arrays
_LARGEST = 1e12  # of a loss or metric of one example
_ROUNDING = 1e-5  # by which a share that was summed in float32 may lie outside of 0 to 1


class Standing(NamedTuple):
    """State of the server between two rounds."""

    state: State  # whose clients are ()
    settled: np.ndarray  # int [N]: the last round in which each client's visit has counted


class Server(NamedTuple):
    """Everything that stays the same while the server runs."""

    run: str
    start: int  # one more than when it was started before
    programs: AtServer
    more: Mapping[str, Any]  # facts of every request: settings, and the federation's description


class Open(NamedTuple):
    """A round or an evaluation whose requests were sent."""

    kind: str
    round: int
    requests: dict[int, bytes]  # by client
    digests: dict[int, str]
    payloads: dict[int, PyTree]


class Came(NamedTuple):
    """An answer to a training request that was read."""

    upload: PyTree
    metrics: dict[str, np.ndarray]
    fine: bool
    down: dict[str, int]
    up: dict[str, int]


def begin(server: Server) -> Standing:
    """Returns the state before the first round."""
    clients = server.programs.method.federation.clients
    return Standing(server.programs.init(), np.full(clients, BEGUN, np.int64))


def sample(server: Server, t: int) -> list[int]:
    """Returns the sorted ids of a round's cohort."""
    each = jax.device_get(server.programs.seats(np.int32(t)))
    return sorted(int(i) for seats in each for i in seats.ids[seats.present])


def open_round(server: Server, standing: Standing, t: int) -> Open:
    """Makes the requests of a round."""
    facts = {"kind": TRAIN, "run": server.run, "round": t}
    payloads = {i: _payload(server, standing, i, t) for i in sample(server, t)}
    return _opened(server, standing, facts, {i: {"payload": p} for i, p in payloads.items()})


def open_evaluation(
    server: Server, standing: Standing, t: int, ids: Iterable[int], *, last: bool = False
) -> Open:
    """Makes the requests of an evaluation.

    Args:
      last: it is the end, and clients keep their models.
    """
    facts = {"kind": EVALUATE, "run": server.run, "round": t, "last": last}
    method, each = server.programs.method, {}
    for i in ids:
        serve = server.programs.serve[method.group(i)]
        given = serve(standing.state, np.int32(i), np.int32(t))
        each[i] = {"served": jax.device_get(given)}
        if method.after:
            each[i]["payload"] = _payload(server, standing, i, t)
    return _opened(server, standing, facts, each)


def _payload(server: Server, standing: Standing, i: int, t: int) -> PyTree:
    send = server.programs.send[server.programs.method.group(i)]
    return jax.device_get(send(standing.state, np.int32(i), np.int32(t)))


def _opened(
    server: Server, standing: Standing, facts: Mapping[str, Any], each: Mapping[int, Any]
) -> Open:
    requests, envelope = {}, {"start": server.start}
    for i, parts in each.items():
        own = {**server.more, **facts, "client": i, "settled": int(standing.settled[i])}
        requests[i] = wire.encode(own, parts, envelope)
    digests = {i: wire.decode(content, len(content)).digest for i, content in requests.items()}
    payloads = {i: parts.get("payload") for i, parts in each.items()}
    return Open(facts["kind"], facts["round"], requests, digests, payloads)


def _answered(server: Server, opened: Open, i: int, content: bytes, like: PyTree) -> wire.Message:
    """Reads the answer of client i to its request; raises InvalidError for anything else."""
    most = sum(map(trees.leaf_bytes, jax.tree.leaves(like))) + _SLACK
    found = wire.decode(content, most, schema.ANSWER)
    if "why" in found.facts:
        raise InvalidError(f"it has refused: {found.facts['why']}")
    wanted = {
        "kind": opened.kind,
        "run": server.run,
        "client": i,
        "round": opened.round,
        "request": opened.digests.get(i, ""),
    }
    for word, value in wanted.items():
        if found.facts.get(word) != value:
            raise InvalidError(f"its {word} is not {value!r}")
    return found


def take(server: Server, opened: Open, i: int, content: bytes) -> Came:
    """Reads client i's answer to a round's request; raises InvalidError if it cannot be read.

    An upload that is not finite, or too large, is read and billed, but it is not `fine`.
    """
    g = server.programs.method.group(i)
    like = server.programs.shapes[g].answer
    found = _answered(server, opened, i, content, (like.upload, like.metrics))
    upload = wire.tree(found, "upload", like.upload)
    metrics = wire.tree(found, "metrics", like.metrics)
    wire.only(found, "upload", "metrics")
    fine, down, up = jax.device_get(server.programs.judge[g](opened.payloads[i], upload))
    fine = bool(fine) and found.facts["finite"] and _bounded(metrics)
    return Came(upload, metrics, fine, _plain(down), _plain(up))


def _bounded(metrics: PyTree) -> bool:
    return all(np.all(np.abs(leaf) <= _LARGEST) for leaf in jax.tree.leaves(metrics))


def take_scores(server: Server, opened: Open, i: int, content: bytes) -> Evaluation:
    """Reads client i's answer to an evaluation; raises InvalidError if it cannot be right."""
    like = server.programs.shapes[server.programs.method.group(i)].scores
    found = _answered(server, opened, i, content, like)
    wire.only(found, "scores")
    scores: Evaluation = wire.tree(found, "scores", like)
    counts = server.more["federation"]["counts"][i]
    for word, part in scores._asdict().items():
        if part is not None:
            split = "validation" if word == "validation" else "test"
            _check_scores(server.programs.method.federation.task, part, counts[split], word)
    return scores


def _check_scores(task: Task, scores: Scores, examples: int, where: str) -> None:
    """Checks sums over a client's examples: a share is from 0 to 1, other numbers are bounded.

    Numbers that are not finite pass, because reports leave them out.

    Args:
      examples: how many the client has enrolled with.
      where: the part of the evaluation.
    """
    if scores.examples != examples:
        raise InvalidError(f"its {where} is not over the {examples} examples that it enrolled with")
    one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], scores)
    each = numbers.per_client(one, task)
    shares = {metric.name for metric in task.metrics if metric.unit == "%"}
    for name, (value,) in each.items():
        low, high = (-_ROUNDING, 1 + _ROUNDING) if name in shares else (-_LARGEST, _LARGEST)
        if np.isfinite(value) and not low <= value <= high:
            raise InvalidError(f"its {name} in {where} is not from {low:g} to {high:g}")


def close_round(
    server: Server, standing: Standing, opened: Open, came: Mapping[int, Came]
) -> tuple[Standing, tuple[Log, ...]]:
    """Computes the server's state after a round, and a log for each group.

    Args:
      came: by client, those that answered in time and could be read.
    """
    method, ids = server.programs.method, list(opened.requests)
    cohorts, logs = [], []
    for g in range(len(server.programs.shapes)):
        own = [i for i in ids if method.group(i) == g]
        cohort, log = _cohort(server, opened, g, own, came)
        cohorts.append(cohort)
        logs.append(log)
    counted = [i for i in ids if i in came and came[i].fine]
    if not counted:
        return standing, tuple(logs)
    now = server.programs.receive(standing.state, tuple(cohorts))
    if not trees.all_finite((now[0], now[1])):  # of finite uploads, which are too large together
        rejected = {i: one._replace(fine=False) for i, one in came.items()}
        return close_round(server, standing, opened, rejected)
    settled = standing.settled.copy()
    settled[counted] = opened.round
    return Standing(State(now[0], now[1], ()), settled), tuple(logs)


def _cohort(
    server: Server, opened: Open, g: int, own: list[int], came: Mapping[int, Came]
) -> tuple[Any, Log]:
    """Builds one group's cohort, which has the same number of seats in every round."""
    programs, like = server.programs, server.programs.shapes[g]
    seats: list[int | None] = [*own, *[None] * (programs.cohort - len(own))]
    arrived = [i if i is not None and i in came and came[i].fine else None for i in seats]

    def zeros(template: PyTree) -> PyTree:
        return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), template)

    def stacked(each: Iterable[PyTree]) -> PyTree:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *each)

    empty = zeros((like.payload, like.answer.upload, like.answer.metrics))
    payloads = stacked(empty[0] if i is None else opened.payloads[i] for i in seats)
    uploads = stacked(empty[1] if i is None else came[i].upload for i in arrived)
    metrics = stacked(empty[2] if i is None else came[i].metrics for i in arrived)
    bills = [_bill(programs, opened, g, i, came, empty) for i in seats]
    here = [i for i in own if i in came]
    log: dict[str, Any] = {
        "ids": np.array([[0 if i is None else i for i in seats]], np.int32),
        "present": np.array([[i is not None for i in seats]]),
        "dropped": np.array([[i is not None and i not in here for i in seats]]),
        "rejected": np.array([[i in here and i not in arrived for i in seats]]),
        "metrics": jax.tree.map(lambda leaf: leaf[None], metrics),
        "down": {name: _row(down.get(name, 0) for down, _ in bills) for name in bills[0][0]},
        "up": {name: _row(up.get(name, 0) for _, up in bills) for name in bills[0][1]},
    }
    return programs.cohort_of(g, arrived, payloads, uploads, opened.round), Log(**log)


def _bill(
    programs: AtServer,
    opened: Open,
    g: int,
    i: int | None,
    came: Mapping[int, Came],
    empty: tuple[PyTree, PyTree, PyTree],
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of a visit; an absent client is billed for its download alone."""
    if i is not None and i in came:
        return came[i].down, came[i].up
    payload = empty[0] if i is None else opened.payloads[i]
    _, down, up = jax.device_get(programs.judge[g](payload, empty[1]))
    counts = 0 if i is None else 1
    return {n: counts * b for n, b in _plain(down).items()}, dict.fromkeys(up, 0)


def _row(amounts: Iterable[int]) -> np.ndarray:
    return np.array([list(amounts)], np.int64)


def _plain(bill: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(amount) for name, amount in bill.items()}


def scores_of_all(server: Server, came: Mapping[int, Evaluation]) -> Evaluation:
    """Stacks the sums of all clients, [N]; a client without an answer has zeros."""
    method = server.programs.method
    template = server.programs.shapes[0].scores
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), template)
    each = [came.get(i, zeros) for i in range(method.federation.clients)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)
