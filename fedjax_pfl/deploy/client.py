"""Responses of one client to the server's training and evaluation requests.

Only the upload of `train` and sums of metrics leave the client. A response is written to disk
before it is sent: a repeated request gets the same bytes and is not trained twice.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.deploy import storage, wire
from fedjax_pfl.deploy.programs import ClientPrograms, RoundInputs, round_inputs
from fedjax_pfl.deploy.schema import EVALUATE, TRAIN, InvalidError
from fedjax_pfl.deploy.storage import BEFORE_FIRST_ROUND, ClientDisk, RoundRecord


class Client(NamedTuple):
    """A client in one run."""

    run: str  # unique name of the run
    i: int
    programs: ClientPrograms
    data: FederatedData  # of this client alone
    disk: ClientDisk
    # Called with the variables of the personalised model and the round, at the last evaluation.
    save_model: Callable[[PyTree, int], None] | None = None

    def round_inputs(self, t: int) -> RoundInputs:
        """Returns the client's inputs in round `t`."""
        return round_inputs(self.i, t, self.data)


def respond(client: Client, request: wire.Message) -> bytes:
    """Returns the response to a training or evaluation request that matches `schema.REQUEST`.

    Raises InvalidError if the request is refused.
    """
    try:
        kind, t, settled, start = _check_request(client, request)
        if kind == TRAIN:
            return _train(client, request, t, settled, start)
        return _evaluate(client, request, t, settled)
    except UsageError as error:
        raise InvalidError(str(error)) from None
    except OSError as error:
        raise InvalidError(
            f"its disk cannot be written or read ({error.strerror}); make room on it, and the "
            "client takes part again"
        ) from None


def _check_request(client: Client, request: wire.Message) -> tuple[str, int, int, int]:
    """Returns the kind, round, `settled` round and server start of a request.

    Raises InvalidError if the request is for another client or run.
    """
    facts, start = request.facts, request.envelope.get("start", -1)
    kind, t, settled = facts["kind"], facts["round"], facts["settled"]
    if facts["run"] != client.run:
        raise InvalidError("it belongs to another run")
    if facts["client"] != client.i:
        raise InvalidError(f"it is for client {facts['client']}, and this is client {client.i}")
    if start < 0 or settled >= t:
        raise InvalidError(f"it names no start, or a round {t} that cannot be after {settled}")
    return kind, t, settled, start


def _train(client: Client, request: wire.Message, t: int, settled: int, start: int) -> bytes:
    """Trains for round `t`, or returns the stored response if the request is a repetition."""
    try:
        latest = client.disk.newest()
    except UsageError:
        if not settled < client.disk.rounds()[0] <= t:
            raise
        latest = None  # The damaged round has not counted, so training it again is safe.
    if latest is not None:
        if latest.request == request.digest:  # The first response may have been lost.
            return latest.response
        if start < latest.start:
            raise InvalidError("it is of an earlier start of the server")
        if start == latest.start and t <= latest.round:
            raise InvalidError(
                f"round {t} is over for this client, which has been in {latest.round}"
            )
    client_state = _counted_state(client, settled)
    payload = wire.read_tree(request, "payload", client.programs.shapes.payload)
    wire.check_array_groups(request, "payload")
    result = client.programs.train(payload, client_state, client.round_inputs(t))
    facts = {
        "kind": TRAIN,
        "run": client.run,
        "client": client.i,
        "round": t,
        "request": request.digest,
        "finite": bool(result.finite),
    }
    response = wire.encode(facts, {"upload": result.upload, "metrics": result.metrics})
    state = storage.encode_state(result.client)
    client.disk.write(RoundRecord(t, start, request.digest, response, state), settled)
    return response


def _counted_state(client: Client, settled: int) -> PyTree:
    """Returns the client-side state after the last round that counted for this client."""
    if settled == BEFORE_FIRST_ROUND:
        return client.programs.initial_state(client.i)
    if settled not in client.disk.rounds():
        raise InvalidError(
            f"its folder does not hold round {settled}, the last one that counted; restore it from "
            "a backup"
        )
    return storage.decode_state(client.disk.read(settled).state, client.programs.shapes.client)


def _evaluate(client: Client, request: wire.Message, t: int, settled: int) -> bytes:
    """Evaluates the client's model, and saves the model if the request says it is the last."""
    client_state = _counted_state(client, settled)
    shapes, method = client.programs.shapes, client.programs.method
    served_values = wire.read_tree(request, "served", shapes.served)
    payload: Any = None
    if method.evaluate_after:
        payload = wire.read_tree(request, "payload", shapes.payload)
    wire.check_array_groups(request, "served", "payload")
    scores = client.programs.score(served_values, payload, client_state, client.round_inputs(t))
    if request.facts["last"] and client.save_model is not None:
        client.save_model(
            client.programs.personalize(served_values, client_state, client.round_inputs(t)), t
        )
    facts = {
        "kind": EVALUATE,
        "run": client.run,
        "client": client.i,
        "round": t,
        "request": request.digest,
    }
    return wire.encode(facts, {"scores": scores})


def folder(root: str | Path, run: str) -> Path:
    """Returns the folder of a run inside a node's folder; `run` must match `schema.RUN`."""
    return Path(root).expanduser() / f"run-{run}"
