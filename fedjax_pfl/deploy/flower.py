"""Flower carries bytes between the server and the nodes; who is who is looked at here.

A node's client id follows from its name where it is registered, client-0 and so on, and with the
first request that it gets its key is written down beside that: another key is refused from then on.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import run
from fedjax_pfl.deploy.node import refusal
from fedjax_pfl.deploy.own_state import describe, whole

_PART = "message"
NAME = "client-"  # what nodes are called where they are registered, with their client ids
ENDED, FAILED = "The run has ended:", "error:"  # the last line of its log begins so
KEYS = "keys.json"  # beside the run directory: by client, the digest of its node's public key


def packed(content: bytes) -> RecordDict:
    """Bytes as Flower carries them, one array of them."""
    array = Array(dtype="uint8", shape=(len(content),), stype="bytes", data=content)
    return RecordDict({_PART: ArrayRecord({_PART: array})})


def unpacked(record: RecordDict) -> bytes:
    """The inverse; empty where it is anything else, which no reader takes for a message."""
    part: Any = record.array_records.get(_PART, {})
    return part[_PART].data if set(part) == {_PART} else b""


def run_by(grid: Grid, path: str) -> None:
    """A run over a SuperLink, as a JSON file says: `config`, `workdir`, `log` and `waiting`."""
    asked = json.loads(Path(path).read_text())
    directory = Path(asked["workdir"])
    directory.parent.mkdir(parents=True, exist_ok=True)

    def tell(line: str) -> None:
        with open(asked["log"], "a") as file:
            file.write(line + "\n")

    try:
        waiting = run.Waiting(**asked["waiting"])
        exchange = ByFlower(grid, directory, asked["config"]["clients"], tell)
        exchange.wait(waiting.seconds)
        done = run.run(_tuples(asked["config"]), directory, exchange, waiting, tell)
        tell(f"{ENDED} {done.directory}")
    except UsageError as error:
        tell(f"{FAILED} {error}")
        raise
    except BaseException as error:
        tell(f"{FAILED} {type(error).__name__}: {error}")
        raise


def _tuples(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _tuples(value) for key, value in plain.items()}
    return tuple(map(_tuples, plain)) if isinstance(plain, list) else plain


class ByFlower:
    """An exchange over a SuperLink."""

    def __init__(self, grid: Grid, directory: Path, clients: int, tell: Any) -> None:
        self.grid, self.directory, self.count, self.tell = grid, directory, clients, tell
        self.said: set[str] = set()

    def wait(self, seconds: float) -> None:
        """Until all nodes are there, or the time is up."""
        until = time.monotonic() + seconds
        while len(self.nodes()) < self.count and time.monotonic() < until:
            time.sleep(1)

    def nodes(self) -> dict[int, int]:
        """The node of each client that is online, by the names and keys of those registered."""
        path = self.directory.with_name(f"{self.directory.name}.{KEYS}")
        keys, found = describe(path), dict[int, int]()
        before = dict(keys)
        for one in self.grid.get_nodes():
            number = one.name.removeprefix(NAME)
            if one.status not in ("", "online") or not one.name.startswith(NAME):
                continue
            if not number.isdigit() or int(number) >= self.count:
                continue
            key = hashlib.sha256(one.public_key).hexdigest()
            if keys.setdefault(number, key) != key or list(keys.values()).count(key) > 1:
                self.once(f"{one.name} has another key than before, or another client's: refused")
                if number not in before:
                    del keys[number]
                continue
            found[int(number)] = one.node_id
        if keys != before:
            whole(path, json.dumps(keys, indent=2).encode() + b"\n")
        return found

    def once(self, line: str) -> None:
        """Tell a line that has not been told."""
        if line not in self.said:
            self.said.add(line)
            self.tell(line)

    def ask(
        self, requests: Mapping[int, bytes], seconds: float | None
    ) -> Iterator[tuple[int, bytes]]:
        """See `run.Exchange`; an error of Flower's comes back as a refusal."""
        until = time.monotonic() + (seconds or 1e9)
        nodes, left = self.nodes(), dict[str, int]()
        for i, content in requests.items():
            if i in nodes:
                message = Message(packed(content), nodes[i], "query", ttl=(seconds or 3600) + 60)
                (found,) = self.grid.push_messages([message]) or [""]
                if found:
                    left[found] = i
        while left and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(left)):
                i = left.pop(reply.metadata.reply_to_message_id, -1)
                if i in requests:
                    yield i, self.read(reply, nodes[i])
            if left:
                time.sleep(0.2)

    def read(self, reply: Message, node: int) -> bytes:
        """An answer's bytes; the text of an error may be anything, and is not passed on."""
        if reply.has_error():
            return refusal({}, f"Flower reports error {reply.error.code} of its node")
        if reply.metadata.src_node_id != node:
            return refusal({}, "it comes from another node")
        return unpacked(reply.content)
