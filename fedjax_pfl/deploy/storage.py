"""Files on disk: atomic writes, checked JSON files, and a client's state after each of its rounds.

The file of a round holds the client's response and its state after training. The server's next
request names the last round that counted (`settled`). The client continues from that state and
removes the files of later rounds.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import schema, wire

# More than one, because a server whose newest checkpoint is damaged resumes from an older one.
ROUNDS_KEPT = 3
BEFORE_FIRST_ROUND = -1  # value of `settled` for a client that has not completed a round
_NAME = re.compile(r"visit-(\d{9})")


class RoundRecord(NamedTuple):
    """One round of a client, as stored on its disk."""

    round: int  # index of the round
    start: int  # how often the server had been restarted when it sent the request
    request: str  # digest of the training request
    response: bytes  # encoded response
    state: bytes  # client-side state after training, see `encode_state`


class ClientDisk(NamedTuple):
    """Folder of one client in one run, with a file for each stored round."""

    folder: Path

    def rounds(self) -> list[int]:
        """Returns the indices of all stored rounds, newest first."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.glob("visit-*"))
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def newest(self) -> RoundRecord | None:
        """Returns the newest stored round, or None if there is none."""
        rounds = self.rounds()
        return self.read(rounds[0]) if rounds else None

    def read(self, t: int) -> RoundRecord:
        """Reads a stored round; raises UsageError if the file is missing or damaged."""
        path = self._path(t)
        try:
            digest, _, content = path.read_bytes().partition(b"\n")
        except OSError as error:
            raise UsageError(f"{path.name} cannot be read ({error.strerror})") from None
        if hashlib.sha256(content).hexdigest().encode() != digest:
            raise UsageError(
                f"{path.name} is damaged: its checksum does not match; restore it from a backup"
            )
        line, _, body = content.partition(b"\n")
        facts = json.loads(line)
        schema.ROUND_RECORD(facts, path.name)
        cut = facts.pop("answer_bytes")
        return RoundRecord(**facts, response=body[:cut], state=body[cut:])

    def write(self, record: RoundRecord, settled: int) -> None:
        """Writes a round atomically and removes the rounds that no request will name.

        `settled` is the last round before this one whose update the server used.
        """
        facts = {
            "round": record.round,
            "start": record.start,
            "request": record.request,
            "answer_bytes": len(record.response),
        }
        line = json.dumps(facts, sort_keys=True).encode() + b"\n"
        content = line + record.response + record.state
        digest = hashlib.sha256(content).hexdigest().encode() + b"\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path(record.round), digest + content)
        counted = [t for t in self.rounds() if t <= settled]
        for t in self.rounds():
            if t != record.round and (t > settled or t not in counted[:ROUNDS_KEPT]):
                self._path(t).unlink(missing_ok=True)

    def _path(self, t: int) -> Path:
        """Returns the path of the file of round `t`."""
        return self.folder / f"visit-{t:09d}"


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file atomically; returns when its content is on the disk."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Writes JSON data atomically, with a newline at the end."""
    write_atomic(path, json.dumps(content, indent=indent).encode() + b"\n")


def encode_state(state: PyTree) -> bytes:
    """Encodes a client-side state, a tree of arrays."""
    return wire.encode({}, {"client": state})


def decode_state(content: bytes, template: PyTree) -> PyTree:
    """Decodes a state that `encode_state` encoded, of the template's structure and shapes."""
    return wire.read_tree(wire.decode(content, len(content)), "client", template)


def read_json(path: Path, check: schema.Check) -> dict[str, Any]:
    """Reads a JSON object. Returns an empty dict if there is no such file.

    Raises UsageError if the file cannot be read, or if `check`, a function of the object and the
    file's name, raises InvalidError.
    """
    try:
        content = json.loads(path.read_bytes())
        check(content, path.name)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, schema.InvalidError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return content
