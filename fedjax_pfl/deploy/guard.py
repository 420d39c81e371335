"""Ends the processes of a trial when the trial has ended or was killed.

    python -I guard.py HOME

The guard waits for the end of its standard input, which the trial holds open. It runs as a script
and needs only the standard library.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_TERM_SECONDS = 10.0  # time between SIGTERM and SIGKILL


def running_processes(home: str | Path, word: str = "") -> list[int]:
    """Returns the ids of processes whose FLWR_HOME is `home` and whose command line has `word`."""
    marker, pids = f"FLWR_HOME={home}\0".encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if marker not in (path / "environ").read_bytes() + b"\0":
                continue
            if word.encode() in (path / "cmdline").read_bytes():
                pids.append(int(path.name))
    return pids


def end_processes(home: str | Path) -> None:
    """Ends the processes of `running_processes` with SIGTERM and, if they remain, SIGKILL."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _TERM_SECONDS
        for pid in running_processes(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        time.sleep(0.1)  # A process that is starting has no environment for a moment.
        while running_processes(home) and time.monotonic() < until:
            time.sleep(0.1)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_processes(sys.argv[1])
