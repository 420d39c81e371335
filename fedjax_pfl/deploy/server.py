"""The server's part of a round: requests to the clients, checks of responses, and the new state.

The server computes the same round as the simulation. A client whose response is late or invalid is
absent, like a client that `dropout` removes in a simulation.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.local_training import Scores
from fedjax_pfl.core.task import Task
from fedjax_pfl.deploy import wire
from fedjax_pfl.deploy.programs import ServerPrograms
from fedjax_pfl.deploy.schema import EVALUATE, TRAIN, InvalidError
from fedjax_pfl.deploy.storage import BEFORE_FIRST_ROUND
from fedjax_pfl.simulation import summaries
from fedjax_pfl.simulation.records import Evaluation, Log

_SLACK = 1_000_000  # bytes of a response besides its arrays
_MAX_METRIC = 1e30  # largest loss or metric of one example; sums of them are computed in float64
_ROUNDING = 1e-5  # rounding error of a percentage that was summed in float32


class ServerState(NamedTuple):
    """State of the server between two rounds.

    `settled`, int [N], is the last round when the server used the client's update, or
    BEFORE_FIRST_ROUND.
    """

    state: State  # with () as `clients`
    settled: np.ndarray


class Server(NamedTuple):
    """Constants of a running server."""

    run: str  # unique name of the run
    start: int  # number of this start, larger than that of each earlier one
    programs: ServerPrograms  # compiled programs of the server
    request_facts: Mapping[str, Any]  # `settings` and `federation`, which every request contains


class PendingRequests(NamedTuple):
    """Requests of a round or an evaluation. Dicts are keyed by client id."""

    kind: str  # TRAIN or EVALUATE
    round: int  # index of the round, or for EVALUATE the number of rounds that were trained
    requests: dict[int, bytes]  # encoded requests
    digests: dict[int, str]  # digest of each request, which its response repeats
    payloads: dict[int, PyTree]  # download of each client; None if the request has none


class ClientUpdate(NamedTuple):
    """Decoded response to a training request."""

    upload: PyTree
    metrics: dict[str, np.ndarray]  # training metrics by name
    accepted: bool  # False if the update is not finite or too large; then it is not used
    down: dict[str, int]  # downloaded bytes by layer
    up: dict[str, int]  # uploaded bytes by layer


def initial_state(server: Server) -> ServerState:
    """Returns the server state before the first round."""
    clients = server.programs.method.federation.clients
    return ServerState(server.programs.init(), np.full(clients, BEFORE_FIRST_ROUND, np.int64))


def sample(server: Server, t: int) -> list[int]:
    """Returns the sorted client ids of the cohort of round `t`."""
    group_slots = jax.device_get(server.programs.sample_slots(np.int32(t)))
    return sorted(int(i) for slots in group_slots for i in slots.ids[slots.present])


def open_round(server: Server, server_state: ServerState, t: int) -> PendingRequests:
    """Samples the cohort of round `t` and builds its training requests."""
    facts = {"kind": TRAIN, "run": server.run, "round": t}
    payloads = _payloads(server, server_state, sample(server, t), t)
    parts = {i: {"payload": payload} for i, payload in payloads.items()}
    return _encode_requests(server, server_state, facts, parts)


def open_evaluation(
    server: Server, server_state: ServerState, t: int, ids: Iterable[int], *, last: bool = False
) -> PendingRequests:
    """Builds the requests to evaluate the clients `ids` after `t` rounds.

    With `last` the run ends after this evaluation, and clients save their models.
    """
    facts = {"kind": EVALUATE, "run": server.run, "round": t, "last": last}
    method, parts_by_client = server.programs.method, {}
    for i in ids:
        server_part = server.programs.server_part[method.group(i)]
        served_values = server_part(server_state.state, np.int32(i), np.int32(t))
        parts_by_client[i] = {"served": jax.device_get(served_values)}
        if method.evaluate_after:
            parts_by_client[i]["payload"] = _payloads(server, server_state, [i], t)[i]
    return _encode_requests(server, server_state, facts, parts_by_client)


def _payloads(
    server: Server, server_state: ServerState, ids: Sequence[int], t: int
) -> dict[int, PyTree]:
    """Computes the payloads of clients in round `t`, by client id."""
    payloads: dict[int, PyTree] = {}
    for g, send in enumerate(server.programs.send):
        members = [i for i in ids if server.programs.method.group(i) == g]
        if members:
            # Repeated ids keep the shape if groups have other numbers of clients in other rounds.
            slots = np.resize(np.array(members, np.int32), len(ids))
            stacked = jax.device_get(send(server_state.state, slots, np.int32(t)))
            payloads |= {i: trees.row(stacked, k) for k, i in enumerate(members)}
    return {i: payloads[i] for i in ids}


def _encode_requests(
    server: Server,
    server_state: ServerState,
    facts: Mapping[str, Any],
    parts_by_client: Mapping[int, Any],
) -> PendingRequests:
    """Encodes a request for each client in `parts_by_client`.

    Each request has the `facts`, with its kind and round, and the client's trees of arrays:
    `parts_by_client` maps the client id to {name of the tree: tree}.
    """
    requests, envelope = {}, {"start": server.start}
    for i, parts in parts_by_client.items():
        client_facts = {"client": i, "settled": int(server_state.settled[i])}
        all_facts = {**server.request_facts, **facts, **client_facts}
        requests[i] = wire.encode(all_facts, parts, envelope)
    digests = {i: wire.decode(content, len(content)).digest for i, content in requests.items()}
    payloads = {i: parts.get("payload") for i, parts in parts_by_client.items()}
    return PendingRequests(
        kind=facts["kind"],
        round=facts["round"],
        requests=requests,
        digests=digests,
        payloads=payloads,
    )


def _read_response(
    server: Server, pending: PendingRequests, i: int, content: bytes, template: PyTree
) -> wire.Message:
    """Decodes the response `content` of client `i` to its request in `pending`.

    Raises InvalidError if it answers no such request, or is much larger than the arrays of
    `template`, which it must hold.
    """
    max_bytes = sum(map(trees.leaf_bytes, jax.tree.leaves(template))) + _SLACK
    expected = {
        "kind": pending.kind,
        "run": server.run,
        "client": i,
        "round": pending.round,
        "request": pending.digests.get(i, ""),
    }
    return wire.read_response(content, max_bytes, expected)


def read_update(server: Server, pending: PendingRequests, i: int, content: bytes) -> ClientUpdate:
    """Decodes the response `content` of client `i` to its training request in `pending`.

    An upload that is not finite or too large is decoded and its bytes are counted, but it is not
    `accepted`. Raises InvalidError if the response cannot be decoded.
    """
    g = server.programs.method.group(i)
    shapes = server.programs.shapes[g].result
    message = _read_response(server, pending, i, content, (shapes.upload, shapes.metrics))
    upload = wire.read_tree(message, "upload", shapes.upload)
    metrics = wire.read_tree(message, "metrics", shapes.metrics)
    wire.check_array_groups(message, "upload", "metrics")
    accepted, down, up = _check_upload(server.programs, g, pending.payloads[i], upload)
    are_bounded = all(np.all(np.abs(leaf) <= _MAX_METRIC) for leaf in jax.tree.leaves(metrics))
    accepted = accepted and message.facts["finite"] and are_bounded
    return ClientUpdate(upload=upload, metrics=metrics, accepted=accepted, down=down, up=up)


def _check_upload(
    programs: ServerPrograms, g: int, payload: PyTree, upload: PyTree
) -> tuple[bool, dict[str, int], dict[str, int]]:
    """Checks an upload of a client in group `g`, whose download was `payload`.

    Returns True if it is accepted, bytes downloaded by layer, and bytes uploaded by layer.
    """
    accepted, down, up = jax.device_get(programs.check_upload[g](payload, upload))
    down, up = ({name: int(size) for name, size in sizes.items()} for sizes in (down, up))
    return bool(accepted), down, up


def read_scores(server: Server, pending: PendingRequests, i: int, content: bytes) -> Evaluation:
    """Decodes the response `content` of client `i` to its evaluation request in `pending`.

    Raises InvalidError if it cannot be decoded or holds impossible scores.
    """
    template = server.programs.shapes[server.programs.method.group(i)].scores
    message = _read_response(server, pending, i, content, template)
    wire.check_array_groups(message, "scores")
    scores: Evaluation = wire.read_tree(message, "scores", template)
    counts = server.request_facts["federation"]["counts"][i]
    for name, part in scores._asdict().items():
        if part is not None:
            split = "validation" if name == "validation" else "test"
            _check_scores(server.programs.method.federation.task, part, counts[split], name)
    return scores


def _check_scores(task: Task, scores: Scores, examples: int, part: str) -> None:
    """Raises InvalidError if a percentage is outside 0 to 1 or another metric is too large.

    Numbers that are not finite pass, because reports leave them out. Also raises InvalidError if
    the scores, of field `part` of `Evaluation`, are not sums over the number of examples with which
    the client enrolled.
    """
    if scores.examples != examples:
        raise InvalidError(f"its {part} is not over the {examples} examples that it enrolled with")
    stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], scores)
    values = summaries.per_client(stacked, task)
    shares = {metric.name for metric in task.metrics if metric.unit == "%"}
    for name, (value,) in values.items():
        low, high = (-_ROUNDING, 1 + _ROUNDING) if name in shares else (-_MAX_METRIC, _MAX_METRIC)
        if np.isfinite(value) and not low <= value <= high:
            raise InvalidError(f"its {name} in {part} is not from {low:g} to {high:g}")


def require_updates(
    pending: PendingRequests, updates: Mapping[int, ClientUpdate], least: int
) -> None:
    """Raises UsageError if all clients have answered and fewer than `least` updates are accepted.

    Nodes would send the same updates again.
    """
    rejected = [str(i) for i, update in sorted(updates.items()) if not update.accepted]
    if len(updates) == len(pending.requests) and len(updates) - len(rejected) < least:
        raise UsageError(
            f"the updates of clients {', '.join(rejected)} in round {pending.round + 1} are not "
            f"finite or too large, and a round needs {least} others; start again with a smaller "
            "learning_rate and another workdir"
        )


def close_round(
    server: Server,
    server_state: ServerState,
    pending: PendingRequests,
    updates: Mapping[int, ClientUpdate],
) -> tuple[ServerState, tuple[Log, ...]]:
    """Computes the server state after the round of the `pending` requests.

    `updates` are the decoded responses by client id, without absent clients. Returns the new state,
    or the old one if no update was accepted, and a log for each group.
    """
    method, ids = server.programs.method, list(pending.requests)
    cohorts, logs = [], []
    for g in range(len(server.programs.shapes)):
        group_ids = [i for i in ids if method.group(i) == g]
        cohort, log = _cohort(server, pending, g, group_ids, updates)
        cohorts.append(cohort)
        logs.append(log)
    counted = [i for i in ids if i in updates and updates[i].accepted]
    if not counted:
        return server_state, tuple(logs)
    new_state = server.programs.receive(server_state.state, tuple(cohorts))
    # Uploads that are finite one by one can still overflow when they are averaged.
    if not trees.all_finite((new_state[0], new_state[1])):
        rejected = {i: update._replace(accepted=False) for i, update in updates.items()}
        return close_round(server, server_state, pending, rejected)
    settled = server_state.settled.copy()
    settled[counted] = pending.round
    return ServerState(State(new_state[0], new_state[1], ()), settled), tuple(logs)


def _cohort(
    server: Server,
    pending: PendingRequests,
    g: int,
    group_ids: list[int],
    updates: Mapping[int, ClientUpdate],
) -> tuple[Any, Log]:
    """Returns the `Cohort` and the log of group `g`, of which the clients `group_ids` were sampled.

    The cohort is padded to the same number of slots in every round. `updates` has the decoded
    responses by client id.
    """
    programs, shapes = server.programs, server.programs.shapes[g]
    slots: list[int | None] = [*group_ids, *[None] * (programs.cohort - len(group_ids))]
    responded = {i for i in group_ids if i in updates}
    accepted_ids = [i if i in responded and updates[i].accepted else None for i in slots]
    empty = _zeros((shapes.payload, shapes.result.upload, shapes.result.metrics))
    payloads = _stack(empty[0] if i is None else pending.payloads[i] for i in slots)
    uploads = _stack(empty[1] if i is None else updates[i].upload for i in accepted_ids)
    metrics = _stack(empty[2] if i is None else updates[i].metrics for i in accepted_ids)
    slots_down: list[dict[str, int]] = []  # bytes by layer, for each slot
    slots_up: list[dict[str, int]] = []
    for i in slots:
        if i in responded:
            down, up = updates[i].down, updates[i].up
        else:  # An absent client has only downloaded.
            payload = empty[0] if i is None else pending.payloads[i]
            _, down, up = _check_upload(programs, g, payload, empty[1])
            up = dict.fromkeys(up, 0)
        slots_down.append(dict.fromkeys(down, 0) if i is None else down)
        slots_up.append(up)

    def by_layer(slots: list[dict[str, int]]) -> dict[str, Any]:
        return {n: np.array([[sizes.get(n, 0) for sizes in slots]], np.int64) for n in slots[0]}

    log: dict[str, Any] = {
        "ids": np.array([[0 if i is None else i for i in slots]], np.int32),
        "present": np.array([[i is not None for i in slots]]),
        "dropped": np.array([[i is not None and i not in responded for i in slots]]),
        "rejected": np.array([[i in responded and not updates[i].accepted for i in slots]]),
        "metrics": jax.tree.map(lambda leaf: leaf[None], metrics),
        "down": by_layer(slots_down),
        "up": by_layer(slots_up),
    }
    return programs.build_cohort(g, accepted_ids, payloads, uploads, pending.round), Log(**log)


def stack_scores(server: Server, scores: Mapping[int, Evaluation]) -> Evaluation:
    """Stacks the scores of all clients, given by client id, to leaves of shape [N, ...].

    Clients without scores get zeros. `server` has the shapes of scores.
    """
    clients = server.programs.method.federation.clients
    zeros = _zeros(server.programs.shapes[0].scores)
    return _stack(scores.get(i, zeros) for i in range(clients))


def is_complete(federation: Federation, scores: Evaluation) -> bool:
    """Returns True if all active clients with validation examples have sent scores.

    Means over other clients cannot be compared. `scores` are as from `stack_scores`.
    """
    counts = federation.validation_counts
    if scores.validation is None or counts is None:
        return True
    is_missing = np.asarray(scores.validation.examples) == 0
    return not np.any(federation.active & (np.asarray(counts) > 0) & is_missing)


def _zeros(template: PyTree) -> PyTree:
    """Returns a tree of zeros with the shapes and types of a template."""
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), template)


def _stack(slot_trees: Iterable[PyTree]) -> PyTree:
    """Stacks the leaves of trees with the same structure on a new first axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *slot_trees)
