"""Ends the processes of a trial on one machine when the trial has ended or was killed.

python -I guard.py HOME

It waits for the end of its standard input, whose other end only the trial holds. It is started by
its path and needs only the standard library.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_SECONDS = 10.0  # that processes have to end by themselves


def left(home: str | Path, word: str = "") -> list[int]:
    """Returns the processes that have this home for Flower in their environment.

    Args:
      word: of their command line.
    """
    mark, found = f"FLWR_HOME={home}\0".encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark not in (path / "environ").read_bytes() + b"\0":
                continue
            if word.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def end(home: str | Path) -> None:
    """Ends these processes by SIGTERM, and those that stay by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _SECONDS
        for pid in left(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.1)  # one that is just being started has no environment for a moment
        while left(home) and time.monotonic() < until:
            time.sleep(0.1)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
