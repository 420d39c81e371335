"""Carries bytes between the server and the nodes over Flower, and identifies the nodes.

A node's client id follows from the name under which it is registered, such as client-0. Its key is
stored with the first request; another key is refused from then on.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import run, schema
from fedjax_pfl.deploy.lines import one_line
from fedjax_pfl.deploy.node import refusal
from fedjax_pfl.deploy.node_file import tuples
from fedjax_pfl.deploy.own_state import describe, whole

_PART = "message"
NAME = "client-"  # what nodes are called where they are registered, with their client ids
_NUMBER = re.compile("0|[1-9][0-9]{0,6}")  # one way to write each id
_BACK = 120.0  # seconds in which a node that went away while it was asked may come back
_SENT = 3  # times that a request is sent to a node which stays online and reports errors
_LOOK = 2.0  # seconds between two looks at who is online
KEYS = "keys.json"  # beside the run directory: by client, the digest of its node's public key


def packed(content: bytes) -> RecordDict:
    """Packs bytes as Flower carries them: as one array."""
    array = Array(dtype="uint8", shape=(len(content),), stype="bytes", data=content)
    return RecordDict({_PART: ArrayRecord({_PART: array})})


def unpacked(record: RecordDict) -> bytes:
    """Inverse of `packed`. Returns no bytes for any other record."""
    part: Any = record.array_records.get(_PART, {})
    return part[_PART].data if set(part) == {_PART} else b""


def outcome_of(log: Path) -> Path:
    """Returns the path of the file that says how a run has ended; its log is for people only."""
    return log.with_name(f"{log.name}.outcome")


def run_by(grid: Grid, path: str) -> None:
    """Runs over a SuperLink what a JSON file says: `config`, `workdir`, `log` and `waiting`."""
    asked = describe(Path(path), schema.RUN_FILE)
    if not asked:
        raise UsageError(f"{path} is missing; it must hold the run's config, workdir and log")
    directory = Path(asked["workdir"])
    directory.parent.mkdir(parents=True, exist_ok=True)
    outcome = outcome_of(Path(asked["log"]))
    outcome.unlink(missing_ok=True)

    def tell(line: str) -> None:
        with open(asked["log"], "a", encoding="utf-8") as file:
            file.write(one_line(line) + "\n")

    def ends(**how: str) -> None:
        whole(outcome, json.dumps(how).encode() + b"\n")

    try:
        config = tuples(asked["config"])
        clients = run.assembly.complete(config)[0].clients
        waiting = run.Waiting(**asked.get("waiting", {}))
        exchange = ByFlower(grid, directory, clients, tell)
        tell(f"Waiting for the nodes of {exchange.count} clients")
        tell(f"{exchange.wait(waiting.seconds)} of {exchange.count} are online")
        done = run.run(config, directory, exchange, waiting, tell)
        tell(f"The run has ended: {done.directory}")
        ends(directory=str(done.directory))
    except UsageError as error:
        tell(f"error: {error}")
        ends(error=one_line(str(error)))
        raise
    except BaseException as error:  # with the SuperLink gone, say: given again, the run goes on
        tell(f"the server's app ends by {type(error).__name__}: {error}")
        raise


class Online(NamedTuple):
    """A client's node that is online, and the time since when."""

    node: int
    since: str


class ByFlower:
    """An exchange over a SuperLink."""

    def __init__(self, grid: Grid, directory: Path, clients: int, tell: Any) -> None:
        self.grid, self.directory, self.count, self.tell = grid, directory, clients, tell
        self.said: set[str] = set()

    def wait(self, seconds: float) -> int:
        """Waits until all nodes are online or the time is up; returns their number."""
        until = time.monotonic() + seconds
        while (there := len(self.nodes())) < self.count and time.monotonic() < until:
            time.sleep(1)
        return there

    def nodes(self) -> dict[int, Online]:
        """Returns the online node of each client, identified by its registered name and key."""
        path = self.directory.with_name(f"{self.directory.name}.{KEYS}")
        keys, found = describe(path, schema.KEYS), dict[int, Online]()
        before = dict(keys)
        for one in self.grid.get_nodes():
            number = one.name.removeprefix(NAME)
            if one.status not in ("", "online") or not one.name.startswith(NAME):
                continue
            if not _NUMBER.fullmatch(number) or int(number) >= self.count:
                last = f"{NAME}{self.count - 1}"
                self.once(f"{one.name!a} is no client's name: use {NAME}0 to {last}; refused")
                continue
            key = hashlib.sha256(one.public_key).hexdigest()
            others = [other for other in keys if other != number and keys[other] == key]
            if keys.get(number, key) != key or others:
                self.once(f"{one.name} has another key than before, or another client's: refused")
                continue
            keys[number] = key
            found[int(number)] = Online(one.node_id, one.last_activated_at)
        if keys != before:
            whole(path, json.dumps(keys, indent=2).encode() + b"\n")
        return found

    def once(self, line: str) -> None:
        """Tells a line once."""
        if line not in self.said:
            self.said.add(line)
            self.tell(line)

    def ask(
        self, requests: Mapping[int, bytes], seconds: float | None
    ) -> Iterator[tuple[int, bytes]]:
        """See `run.Exchange`. An offline node is absent at once; one that goes offline may return.

        Flower does not deliver again what was lost with a process. A node that returns is therefore
        sent its request again, and repeats its answer if it had one.
        """
        until, look = time.monotonic() + (seconds or 1e9), time.monotonic() + _LOOK
        nodes = self.nodes()
        one = _Asked({i: content for i, content in requests.items() if i in nodes})
        self.send(one, nodes, seconds)
        while one.left and (now := time.monotonic()) < until:
            for reply in self.grid.pull_messages(list(one.out)):
                i, node = one.out.pop(reply.metadata.reply_to_message_id, (-1, 0))
                if i not in one.left or (reply.has_error() and self.failed(one, i, reply)):
                    continue
                del one.left[i]
                yield i, self.read(reply, node)
            for i in [i for i in one.left if now > one.gone.get(i, now)]:
                del one.left[i]
                yield i, refusal(f"its node went away, and was not back in {_BACK:.0f} s")
            if now > look:
                self.send(one, self.nodes(), seconds)
                look = now + _LOOK
            if one.left:
                time.sleep(0.2)

    def send(self, one: "_Asked", nodes: Mapping[int, Online], seconds: float | None) -> None:
        """Sends requests to nodes that have not had theirs since they came online."""
        for i, (node, since) in nodes.items():
            if i not in one.left or one.sent.get(i) == since:
                continue
            content, ttl = packed(one.left[i]), (seconds or 3600) + 60
            (found,) = self.grid.push_messages([Message(content, node, "query", ttl=ttl)]) or [""]
            one.sent[i] = since
            if found:
                one.out[found] = i, node
                one.times[i] = one.times.get(i, 0) + 1
                one.gone.pop(i, None)

    def failed(self, one: "_Asked", i: int, reply: Message) -> bool:
        """Returns True to wait for client i although Flower reports an error of its node."""
        if reply.error.code == ErrorCode.NODE_UNAVAILABLE:
            one.gone.setdefault(i, time.monotonic() + _BACK)
            return True
        if one.times[i] >= _SENT:
            return False
        one.sent.pop(i, None)
        return True

    def read(self, reply: Message, node: int) -> bytes:
        """Returns an answer's bytes; the text of an error is not passed on."""
        if reply.has_error():
            return refusal(f"Flower reports error {reply.error.code} of its node")
        if reply.metadata.src_node_id != node:
            return refusal("it comes from another node")
        return unpacked(reply.content)


class _Asked:
    """Requests that wait for answers; all fields but `out` are by client."""

    def __init__(self, left: Mapping[int, bytes]) -> None:
        self.left = dict(left)
        self.out = dict[str, tuple[int, int]]()  # by message: client and node
        self.sent = dict[int, str]()  # since when the node was there that has the request
        self.times = dict[int, int]()
        self.gone = dict[int, float]()  # until when a node is waited for
