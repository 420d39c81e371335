"""A client on a machine of its own: it answers the server's requests, bytes for bytes.

Its examples and client-side state leave only as `train`'s upload and as sums. An answer is written
to disk before it is sent, so that a repeated request gets the same bytes and is not trained twice.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.deploy import own_state, wire
from fedjax_pfl.deploy.own_state import BEGUN, Disk, Visited
from fedjax_pfl.deploy.programs import At, AtClient, at
from fedjax_pfl.deploy.schema import EVALUATE, TRAIN, InvalidError


class Client(NamedTuple):
    """A node in one run."""

    run: str  # the run's own name, which no other run has
    i: int
    programs: AtClient
    data: FederatedData  # its own
    disk: Disk
    # Is given the client's own model where the server says that it is the last one.
    keep: Callable[[PyTree, int], None] | None = None

    def at(self, t: int) -> At:
        return at(self.i, t, self.data)


def answer(client: Client, request: wire.Message) -> bytes:
    """Returns the answer to a request of a round; raises InvalidError if it gets none.

    Args:
      request: has the form `schema.REQUEST`.
    """
    try:
        kind, t, settled, start = _stamped(client, request)
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


def _stamped(client: Client, request: wire.Message) -> tuple[str, int, int, int]:
    """Returns kind, round, settled round and start of a request for this client and this run."""
    facts, start = request.facts, request.envelope.get("start", -1)
    kind, t, settled = facts["kind"], facts["round"], facts["settled"]
    if facts["run"] != client.run:
        raise InvalidError("it is of another run")
    if facts["client"] != client.i:
        raise InvalidError(f"it is for client {facts['client']}, and this is client {client.i}")
    if start < 0 or settled >= t:
        raise InvalidError(f"it names no start, or a round {t} that cannot be after {settled}")
    return kind, t, settled, start


def _train(client: Client, request: wire.Message, t: int, settled: int, start: int) -> bytes:
    try:
        newest = client.disk.newest()
    except UsageError:
        if not settled < client.disk.rounds()[0] <= t:
            raise
        newest = None  # damaged, but it has not counted: it is trained again
    if newest is not None:
        if newest.request == request.digest:  # again, and the answer may have been lost
            return newest.answer
        if start < newest.start:
            raise InvalidError("it is of an earlier start of the server")
        if start == newest.start and t <= newest.round:
            raise InvalidError(
                f"round {t} is over for this client, which has been in {newest.round}"
            )
    own = _settled(client, settled)
    payload = wire.tree(request, "payload", client.programs.shapes.payload)
    wire.only(request, "payload")
    done = client.programs.work(payload, own, client.at(t))
    facts = {
        "kind": TRAIN,
        "run": client.run,
        "client": client.i,
        "round": t,
        "request": request.digest,
        "finite": bool(done.fine),
    }
    made = wire.encode(facts, {"upload": done.upload, "metrics": done.metrics})
    state = own_state.packed(done.client)
    client.disk.write(Visited(t, start, request.digest, made, state), settled)
    return made


def _settled(client: Client, settled: int) -> PyTree:
    """Returns the client's state after the last visit that counted."""
    if settled == BEGUN:
        return client.programs.first(client.i)
    if settled not in client.disk.rounds():
        raise InvalidError(
            f"its last visit that counted was in round {settled}, and its folder does not hold it; "
            "bring it back from a copy"
        )
    return own_state.unpacked(client.disk.read(settled).state, client.programs.shapes.client)


def _evaluate(client: Client, request: wire.Message, t: int, settled: int) -> bytes:
    own = _settled(client, settled)
    shapes, method = client.programs.shapes, client.programs.method
    given = wire.tree(request, "served", shapes.served)
    payload: Any = None
    if method.after:
        payload = wire.tree(request, "payload", shapes.payload)
    wire.only(request, "served", "payload")
    scores = client.programs.score(given, payload, own, client.at(t))
    if request.facts["last"] and client.keep is not None:
        client.keep(client.programs.personalize(given, own, client.at(t)), t)
    facts = {
        "kind": EVALUATE,
        "run": client.run,
        "client": client.i,
        "round": t,
        "request": request.digest,
    }
    return wire.encode(facts, {"scores": scores})


def folder(root: str | Path, run: str) -> Path:
    """Returns the folder of a run, whose name has the form `schema.RUN`, in a node's folder."""
    return Path(root).expanduser() / f"run-{run}"
