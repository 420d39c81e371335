"""Client-side state on the client's own disk: a file per visit, written before its answer is sent.

A file holds the answer of a visit and the client's state after it. The server's next request names
the last visit that counted (`settled`). The client continues from that one and removes later ones.
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

# Visits that counted and are kept: a server whose newest checkpoint is damaged goes back by one.
KEPT = 3
BEGUN = -1  # the round of the state before the first visit
_NAME = re.compile(r"visit-(\d{9})")


class Visited(NamedTuple):
    """A visit on disk."""

    round: int
    start: int  # of the server, which has sent the request; each start has a larger number
    request: str  # its digest
    answer: bytes
    state: bytes


class Disk(NamedTuple):
    """A client's folder for one run."""

    folder: Path

    def rounds(self) -> list[int]:
        """Returns the rounds of all visits on disk, newest first."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.glob("visit-*"))
        return sorted((int(one[1]) for one in found if one), reverse=True)

    def newest(self) -> Visited | None:
        rounds = self.rounds()
        return self.read(rounds[0]) if rounds else None

    def read(self, t: int) -> Visited:
        """Reads a visit; raises UsageError if the file is damaged."""
        path = self._path(t)
        try:
            digest, _, content = path.read_bytes().partition(b"\n")
        except OSError as error:
            raise UsageError(f"{path.name} cannot be read ({error.strerror})") from None
        if hashlib.sha256(content).hexdigest().encode() != digest:
            raise UsageError(
                f"{path.name} is damaged: it does not hold what was written; bring it back from a "
                "copy"
            )
        line, _, rest = content.partition(b"\n")
        facts = json.loads(line)
        schema.check(schema.VISIT, facts, path.name)
        cut = facts.pop("answer_bytes")
        return Visited(**facts, answer=rest[:cut], state=rest[cut:])

    def write(self, visited: Visited, settled: int) -> None:
        """Adds a visit, whole or not at all, and removes those that no request will name."""
        facts = {
            "round": visited.round,
            "start": visited.start,
            "request": visited.request,
            "answer_bytes": len(visited.answer),
        }
        line = json.dumps(facts, sort_keys=True).encode() + b"\n"
        content = line + visited.answer + visited.state
        digest = hashlib.sha256(content).hexdigest().encode() + b"\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        whole(self._path(visited.round), digest + content)
        counted = [t for t in self.rounds() if t <= settled]
        for t in self.rounds():
            if t != visited.round and (t > settled or t not in counted[:KEPT]):
                self._path(t).unlink(missing_ok=True)

    def _path(self, t: int) -> Path:
        return self.folder / f"visit-{t:09d}"


def whole(path: Path, content: bytes) -> None:
    """Replaces a file atomically, after its content is on the disk."""
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
    held = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def packed(state: PyTree) -> bytes:
    """Packs a client's state for its file."""
    return wire.encode({}, {"client": state})


def unpacked(content: bytes, template: PyTree) -> PyTree:
    """Inverse of `packed`."""
    return wire.tree(wire.decode(content, len(content)), "client", template)


def describe(path: Path, form: Any) -> dict[str, Any]:
    """Returns a JSON file's content, which has a form of `schema`; empty if there is no file."""
    try:
        found = json.loads(path.read_bytes())
        schema.check(form, found, path.name)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, schema.InvalidError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return found
