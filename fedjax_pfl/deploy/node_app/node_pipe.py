"""Socket between Flower's short-lived client process and the node's worker.

Uses only the standard library, because a process for each message must start fast.
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
    """Sends an encoded request to the worker of a node's folder and returns the response.

    Waits up to `seconds` for a worker that is restarting. Raises RuntimeError if the worker does
    not respond.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with _socket(folder) as (connection, address):
                connection.connect(address)
                send(connection, content)
                return receive(connection)
        except OSError:  # Its text may contain the folder's path and must not be sent.
            if time.monotonic() > deadline:
                raise RuntimeError("the node's worker does not respond; start it") from None
            time.sleep(0.5)


@contextlib.contextmanager
def _socket(folder: Path) -> Iterator[tuple[socket.socket, str]]:
    """Creates a Unix socket; yields it, neither bound nor connected, and the worker's address.

    The address is a path that stays within the limit on its length.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    connection = socket.socket(socket.AF_UNIX)
    try:
        yield connection, f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        connection.close()
        os.close(descriptor)


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[socket.socket]:
    """Yields the worker's listening socket in a node's folder; only its owner can connect."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    with _socket(folder) as (listener, address):
        (folder / _SOCKET).unlink(missing_ok=True)
        listener.bind(address)
        listener.listen()
        yield listener


def send(connection: socket.socket, content: bytes) -> None:
    """Sends the length of a message and the message."""
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes:
    """Receives a message that `send` sent."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    """Receives exactly `length` bytes; raises ConnectionResetError if fewer arrive."""
    parts = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
