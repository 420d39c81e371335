"""A client on a machine of its own: it answers the server's requests, each with bytes for bytes.

What it holds of its own, examples and state, leaves only through `train`'s upload and through sums.
An answer is on disk before it is given, so that a request that comes again, after whatever has
happened in between, gets the same bytes and is not trained twice.
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

MOST = 4_000_000_000  # bytes of a request
ENROL, TRAIN, EVALUATE = "enrol", "train", "evaluate"


class Refused(Exception):
    """A request or an answer that is not taken; one line that says why."""


class Client(NamedTuple):
    """What a node is for a run."""

    run: str  # the run's own name, which no other run has
    i: int
    programs: AtClient
    data: FederatedData  # its own
    disk: Disk
    # Is given the client's own model where the server says that it is the last one.
    keep: Callable[[PyTree, int], None] | None = None

    def at(self, t: int) -> At:
        return at(self.i, t, self.data)


def answer(client: Client, content: bytes) -> bytes:
    """The answer to a request; Refused where it gets none, and then nothing has changed."""
    try:
        request = wire.decode(content, MOST)
        kind, t, settled, start = _stamped(client, request)
        if kind == TRAIN:
            return _train(client, request, t, settled, start)
        return _evaluate(client, request, t, settled)
    except (wire.WireError, UsageError) as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(
            f"its disk cannot be written or read ({error.strerror}); make room on it, and the "
            "client takes part again"
        ) from None


def _stamped(client: Client, request: wire.Message) -> tuple[str, int, int, int]:
    """What a request asks for, if it is for this client and this run."""
    kind, run, i = (request.facts.get(word) for word in ("kind", "run", "client"))
    if kind not in (TRAIN, EVALUATE):
        raise Refused(f"it is no request that a client knows: {str(kind)[:40]!r}")
    if run != client.run:
        raise Refused("it is of another run")
    if i != client.i:
        raise Refused(f"it is for client {i}, and this is client {client.i}")
    numbers: list[Any] = [request.facts.get(word) for word in ("round", "settled")]
    numbers.append(request.envelope.get("start"))
    if not all(type(n) is int for n in numbers):
        raise Refused("it names no round, or no start of the server")
    t, settled, start = numbers
    if not BEGUN <= settled < max(t, 1) or t < 0 or start < 0:
        raise Refused(f"round {t} cannot be after round {settled}")
    return str(kind), t, settled, start


def _train(client: Client, request: wire.Message, t: int, settled: int, start: int) -> bytes:
    newest = client.disk.newest()
    if newest is not None:
        if newest.request == request.digest:  # again, and the answer may have been lost
            return newest.answer
        if start < newest.start:
            raise Refused("it is of an earlier start of the server")
        if start == newest.start and t <= newest.round:
            raise Refused(f"round {t} is over for this client, which has been in {newest.round}")
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
        "fine": bool(done.fine),
    }
    made = wire.encode(facts, {"upload": done.upload, "metrics": done.metrics})
    state = own_state.packed(done.client)
    client.disk.write(Visited(t, start, request.digest, made, state), settled)
    return made


def _settled(client: Client, settled: int) -> PyTree:
    """The client's state after the last visit that has counted."""
    if settled == BEGUN:
        return client.programs.first(client.i)
    if settled not in client.disk.rounds():
        raise Refused(
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
    if request.facts.get("last") is True and client.keep is not None:
        client.keep(client.programs.personal(given, own, client.at(t)), t)
    facts = {
        "kind": EVALUATE,
        "run": client.run,
        "client": client.i,
        "round": t,
        "request": request.digest,
    }
    return wire.encode(facts, {"scores": scores})


def folder(root: str | Path, run: str) -> Path:
    """Where a client's own state of a run lies, within the folder that it was given."""
    if not run.isalnum():
        raise Refused("the name of the run is no name")
    return Path(root).expanduser() / f"run-{run}"
