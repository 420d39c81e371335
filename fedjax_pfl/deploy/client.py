"""Responses of one client to the server's training and evaluation requests.

Only the upload of `train` and sums of metrics leave the client. A response is written to disk
before it is sent: a repeated request gets the same bytes and is not trained twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.deploy import storage, wire
from fedjax_pfl.deploy.lines import to_stderr
from fedjax_pfl.deploy.programs import ClientPrograms, RoundInputs
from fedjax_pfl.deploy.schema import TRAIN, InvalidError
from fedjax_pfl.deploy.storage import BEFORE_FIRST_ROUND, ClientDisk, RoundRecord


class RunClient(NamedTuple):
    """A client in one run.

    `save_model` is called at the last evaluation with the variables of the personalised model and
    the number of rounds that were trained; None: the model is not saved.
    """

    run: str  # unique name of the run
    i: int  # client id
    programs: ClientPrograms  # of this client's architecture group
    data: FederatedData  # of this client alone
    disk: ClientDisk  # its state and response after each stored round
    save_model: Callable[[PyTree, int], None] | None = None

    def round_inputs(self, t: int) -> RoundInputs:
        """Returns the inputs of the client's programs in round `t`."""
        return RoundInputs(np.int32(self.i), np.int32(t), self.data)


def respond(client: RunClient, request: wire.Message) -> bytes:
    """Returns the encoded response to a training or evaluation request that passes the schema.

    Raises InvalidError if the request is refused.
    """
    try:
        _check_request(client, request)
        respond_to = _train if request.facts["kind"] == TRAIN else _evaluate
        return respond_to(client, request)
    except UsageError as error:
        raise InvalidError(str(error)) from None
    except OSError as error:
        raise InvalidError(
            f"its disk cannot be written or read ({error.strerror}); make room on it, and the "
            "client takes part again"
        ) from None


def _check_request(client: RunClient, request: wire.Message) -> None:
    """Raises InvalidError if a request is for another client or run, or has no possible round."""
    facts = request.facts
    t, settled = facts["round"], facts["settled"]
    if facts["run"] != client.run:
        raise InvalidError("it belongs to another run")
    if facts["client"] != client.i:
        raise InvalidError(f"it is for client {facts['client']}, and this is client {client.i}")
    if "start" not in request.envelope or settled >= t:
        raise InvalidError(f"it names no start, or a round {t} that cannot be after {settled}")


def _train(client: RunClient, request: wire.Message) -> bytes:
    """Trains for one round and stores the new state; returns the encoded response.

    If the request is a repetition, returns the stored response. Raises InvalidError if it is old.
    """
    t, settled, start = request.facts["round"], request.facts["settled"], request.envelope["start"]
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
    facts = {**wire.response_facts(request), "finite": bool(result.finite)}
    response = wire.encode(facts, {"upload": result.upload, "metrics": result.metrics})
    state = storage.encode_state(result.client)
    record = RoundRecord(
        round=t, start=start, request=request.digest, response=response, state=state
    )
    client.disk.write(record, settled)
    return response


def _counted_state(client: RunClient, settled: int) -> PyTree:
    """Returns the client-side state after round `settled`, the last whose update the server used.

    Before the first round, `settled` is `BEFORE_FIRST_ROUND`. Raises InvalidError if the node has
    not stored it.
    """
    if settled == BEFORE_FIRST_ROUND:
        return client.programs.initial_state(client.i)
    if settled not in client.disk.rounds():
        raise InvalidError(
            f"its folder does not hold round {settled}, the last one that counted; restore it from "
            "a backup"
        )
    return storage.decode_state(client.disk.read(settled).state, client.programs.shapes.client)


def _evaluate(client: RunClient, request: wire.Message) -> bytes:
    """Evaluates the client's model; returns the encoded response.

    Saves the model if the request says that it is the last.
    """
    inputs = client.round_inputs(request.facts["round"])
    client_state = _counted_state(client, request.facts["settled"])
    shapes, method = client.programs.shapes, client.programs.method
    served_values = wire.read_tree(request, "served", shapes.served)
    payload: Any = None
    if method.evaluate_after:
        payload = wire.read_tree(request, "payload", shapes.payload)
    wire.check_array_groups(request, "served", "payload")
    scores = client.programs.score(served_values, payload, client_state, inputs)
    if request.facts["last"] and client.save_model is not None:
        variables = client.programs.personalize(served_values, client_state, inputs)
        try:
            client.save_model(variables, request.facts["round"])
        except (UsageError, OSError) as error:  # the scores must not be lost with the model
            to_stderr(f"client {client.i}: the model is not saved: {error}")
    return wire.encode(wire.response_facts(request), {"scores": scores})
