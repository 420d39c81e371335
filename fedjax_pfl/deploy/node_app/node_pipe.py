"""A socket in the node's folder, over which Flower's short-lived process asks the node's worker.

Nothing but the standard library, because a process that imports more for each message waits for it.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

_LENGTH = struct.Struct("<Q")
_SOCKET = "worker"


def ask(folder: Path, content: bytes, seconds: float = 120.0) -> bytes:
    """Returns the answer of a folder's worker, which may just be starting again."""
    until = time.monotonic() + seconds
    while True:
        try:
            with _socket(folder) as (there, place):
                there.connect(place)
                send(there, content)
                return receive(there)
        except OSError:  # whose text may have the folder's path, and would be sent
            if time.monotonic() > until:
                raise RuntimeError("the node's worker does not answer; start it") from None
            time.sleep(0.5)


@contextlib.contextmanager
def _socket(folder: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket, and its place by a short path: a long one is refused."""
    held = os.open(folder, os.O_RDONLY)
    there = socket.socket(socket.AF_UNIX)
    try:
        yield there, f"/proc/self/fd/{held}/{_SOCKET}"
    finally:
        there.close()
        os.close(held)


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[socket.socket]:
    """The worker's side; the folder is made, and only its owner may enter it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    with _socket(folder) as (there, place):
        (folder / _SOCKET).unlink(missing_ok=True)
        there.bind(place)
        there.listen()
        yield there


def send(there: socket.socket, content: bytes) -> None:
    """A length, and so many bytes."""
    there.sendall(_LENGTH.pack(len(content)) + content)


def receive(there: socket.socket) -> bytes:
    """The inverse."""
    (length,) = _LENGTH.unpack(_exactly(there, _LENGTH.size))
    return _exactly(there, length)


def _exactly(there: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = there.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionResetError("the other side has ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
