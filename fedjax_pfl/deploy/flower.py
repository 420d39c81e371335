"""Exchange between the server and the nodes over Flower, and identification of the nodes.

A node is registered with Flower under a name such as client-0, which contains its client id. Its
key is stored when it is first online; a node with the same name and another key is refused.
"""

import contextlib
import dataclasses
import hashlib
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import run, schema
from fedjax_pfl.deploy.exchange import Waiting
from fedjax_pfl.deploy.lines import one_line
from fedjax_pfl.deploy.node import refusal
from fedjax_pfl.deploy.node_file import DATA_SETTINGS, to_tuples
from fedjax_pfl.deploy.storage import read_json, write_json
from fedjax_pfl.settings import selection

_PART = "message"
NODE_PREFIX = "client-"  # registered name of a node, before its client id
_CLIENT_ID = re.compile("0|[1-9][0-9]{0,6}")  # no leading zeros: one spelling for each id
_RETURN_SECONDS = 120.0  # time for a node that went offline during a request to come back
_MAX_ATTEMPTS = 3  # attempts to send a request to a node that is online and reports errors
_POLL_SECONDS = 2.0  # time between two queries for the nodes that are online
KEYS_FILE = "keys.json"  # next to the run directory: digest of each client's public key


def to_record(content: bytes) -> RecordDict:
    """Packs bytes into a Flower record with one array."""
    array = Array(dtype="uint8", shape=(len(content),), stype="bytes", data=content)
    return RecordDict({_PART: ArrayRecord({_PART: array})})


def from_record(record: RecordDict) -> bytes:
    """Unpacks a record of `to_record`. Returns empty bytes for any other record."""
    part: Any = record.array_records.get(_PART, {})
    return part[_PART].data if set(part) == {_PART} else b""


def outcome_path(log: Path) -> Path:
    """Returns the path of the JSON file that holds the outcome of a run, next to its log.

    Programs read this file instead of the log, because the log quotes text from nodes.
    """
    return log.with_name(f"{log.name}.outcome")


def run_from_file(grid: Grid, path: str) -> None:
    """Runs, over a SuperLink, the configuration in a JSON file that passes `schema.RUN_FILE`.

    Writes the run directory or the error message to the outcome file.
    """
    spec = read_json(Path(path), schema.RUN_FILE)
    if not spec:
        raise UsageError(f"{path} is missing; it must hold the run's config, workdir and log")
    directory, log_path = Path(spec["workdir"]), Path(spec["log"])
    outcome = outcome_path(log_path)
    try:
        for folder in (directory.parent, log_path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        open(log_path, "a").close()
        outcome.unlink(missing_ok=True)
    except OSError as error:
        problem = f"{error.filename} cannot be written ({error.strerror})"
        raise UsageError(f"{problem}; choose another workdir or log in {path}") from None

    def log(line: str) -> None:
        # A full disk must not hide the outcome, which may fit.
        with contextlib.suppress(OSError), open(log_path, "a", encoding="utf-8") as file:
            file.write(one_line(line) + "\n")

    def write_outcome(**fields: str) -> None:
        write_json(outcome, fields)

    try:
        config = to_tuples(spec["config"])
        settings, registry = run.assembly.complete(config)
        if not spec.get("complete"):  # a complete configuration has settings of all components
            if data_settings := sorted(set(config) & DATA_SETTINGS):
                raise UsageError(
                    f"{path}: {data_settings[0]} is a setting of data, which the nodes' files "
                    "decide; leave it out"
                )
            selection.check_used(config, [settings], registry)
        clients = settings.clients
        waiting = Waiting(**spec.get("waiting", {}))
        exchange = FlowerExchange(grid, directory, clients, log)
        log(f"Waiting for the nodes of {exchange.count} clients")
        log(f"{exchange.wait(waiting.seconds)} of {exchange.count} are online")
        result = run.run(config, directory, exchange, waiting, log)
        log(f"The run has ended: {result.directory}")
        write_outcome(directory=str(result.directory))
    except UsageError as error:
        log(f"error: {error}")
        write_outcome(error=one_line(str(error)))
        raise
    except BaseException as error:  # No outcome: the run resumes when the app is restarted.
        log(f"the server's app ended with {type(error).__name__}: {error}")
        raise


class OnlineNode(NamedTuple):
    """A node that is online."""

    node: int  # Flower's id
    since: str  # time when it came online, as Flower writes it


class FlowerExchange:
    """Exchange over a Flower SuperLink, see `exchange.Exchange`.

    Args:
      grid: Flower's connection to the nodes.
      directory: Run directory; the file with the nodes' keys is next to it.
      clients: Number of clients.
      log: Called with each line of the run's log.
    """

    def __init__(self, grid: Grid, directory: Path, clients: int, log: Any) -> None:
        self.grid, self.directory, self.count, self.log = grid, directory, clients, log
        self.logged: set[str] = set()

    def wait(self, seconds: float) -> int:
        """Waits until all nodes are online or the time is up; returns their number."""
        deadline = time.monotonic() + seconds
        while (online := len(self.nodes())) < self.count and time.monotonic() < deadline:
            time.sleep(1)
        return online

    def wait_for_return(self, clients: Iterable[int], seconds: float) -> None:
        """Waits for one of the `clients` that are offline now, see `exchange.Exchange`."""
        deadline = time.monotonic() + seconds
        offline = set(clients) - set(self.nodes())
        while offline and not offline & set(self.nodes()) and time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def nodes(self) -> dict[int, OnlineNode]:
        """Returns the online nodes by client id, identified by registered name and key."""
        path = self.directory.with_name(f"{self.directory.name}.{KEYS_FILE}")
        keys, online = read_json(path, schema.KEYS), dict[int, OnlineNode]()
        stored_keys = dict(keys)
        for node in self.grid.get_nodes():
            number = node.name.removeprefix(NODE_PREFIX)
            if node.status not in ("", "online") or not node.name.startswith(NODE_PREFIX):
                continue
            if not _CLIENT_ID.fullmatch(number) or int(number) >= self.count:
                last = f"{NODE_PREFIX}{self.count - 1}"
                self.log_once(
                    f"{node.name!a} is not a client's name: use {NODE_PREFIX}0 to {last}; refused"
                )
                continue
            key = hashlib.sha256(node.public_key).hexdigest()
            other_owners = [owner for owner in keys if owner != number and keys[owner] == key]
            if keys.get(number, key) != key or other_owners:
                self.log_once(
                    f"{node.name} has another key than before, or another client's: refused; if "
                    f"its owner replaced the key, remove client {number} from {path}"
                )
                continue
            keys[number] = key
            online[int(number)] = OnlineNode(node.node_id, node.last_activated_at)
        if keys != stored_keys:
            write_json(path, keys, indent=2)
        return online

    def log_once(self, line: str) -> None:
        """Logs a line, unless the same line was logged before."""
        if line not in self.logged:
            self.logged.add(line)
            self.log(line)

    def ask(
        self, requests: Mapping[int, bytes], seconds: float | None
    ) -> Iterator[tuple[int, bytes]]:
        """Sends requests and yields responses, see `exchange.Exchange`.

        A node that is offline at the start is skipped. A node that goes offline later gets its
        request again when it returns, because Flower loses messages when a process ends. The node
        repeats its response if it already has one.
        """
        start = time.monotonic()
        deadline, next_poll = start + (seconds or 1e9), start + _POLL_SECONDS
        nodes = self.nodes()
        pending = {i: _Pending(content) for i, content in requests.items() if i in nodes}
        sent: dict[str, tuple[int, int]] = {}  # client and node by message id
        self.send(pending, sent, nodes, seconds)
        while pending and (current_time := time.monotonic()) < deadline:
            for reply in self.grid.pull_messages(list(sent)):
                i, node = sent.pop(reply.metadata.reply_to_message_id, (-1, 0))
                if i not in pending or (reply.has_error() and pending[i].should_wait(reply)):
                    continue
                del pending[i]
                yield i, self.read(reply, node)
            for i in [i for i in pending if current_time > pending[i].give_up_at]:
                del pending[i]
                why = f"its node went offline for more than {_RETURN_SECONDS:.0f} s"
                yield i, refusal(why)
            if current_time > next_poll:
                self.send(pending, sent, self.nodes(), seconds)
                next_poll = current_time + _POLL_SECONDS
            if pending:
                time.sleep(0.2)

    def send(
        self,
        pending: Mapping[int, "_Pending"],
        sent: dict[str, tuple[int, int]],
        nodes: Mapping[int, OnlineNode],
        seconds: float | None,
    ) -> None:
        """Sends its pending request to each node that has not got it since it came online.

        `pending` and `nodes`, those that are online, are by client id. `sent` gets client id and
        node id of each message, by message id. Messages expire a minute after `seconds`; None:
        after an hour and a minute.
        """
        for i, (node, since) in nodes.items():
            if i not in pending or pending[i].sent_since == since:
                continue
            content, ttl = to_record(pending[i].content), (seconds or 3600) + 60
            message = Message(content, node, "query", ttl=ttl)
            (message_id,) = self.grid.push_messages([message]) or [""]
            if message_id:
                pending[i].sent_since = since
                sent[message_id] = i, node
                pending[i].attempts += 1
                pending[i].give_up_at = math.inf

    def read(self, reply: Message, node: int) -> bytes:
        """Returns the bytes of a response from `node`, Flower's id of the node that was asked.

        An error, or a reply of another node, becomes a refusal without Flower's text.
        """
        if reply.has_error():
            return refusal(f"Flower reports error {reply.error.code} of its node")
        if reply.metadata.src_node_id != node:
            return refusal("it comes from another node")
        return from_record(reply.content)


@dataclasses.dataclass
class _Pending:
    """A client's request without a response yet."""

    content: bytes  # encoded request
    sent_since: str | None = None  # `OnlineNode.since` of the node that got the request
    attempts: int = 0  # how often it was sent
    give_up_at: float = math.inf  # deadline for a node that is offline, in monotonic seconds

    def should_wait(self, reply: Message) -> bool:
        """Returns True if the request can still be answered after this error from Flower.

        If the node is offline, sets `give_up_at` to two minutes from now, unless it is earlier.
        After another error, marks the request to be sent again, `_MAX_ATTEMPTS` times in all.
        """
        if reply.error.code == ErrorCode.NODE_UNAVAILABLE:
            self.give_up_at = min(self.give_up_at, time.monotonic() + _RETURN_SECONDS)
            return True
        self.sent_since = None
        return self.attempts < _MAX_ATTEMPTS
