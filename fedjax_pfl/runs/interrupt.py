"""Ctrl-C and SIGTERM: the first saves the rounds being computed, the second ends the process.

Commands handle both signals. A call from Python or a notebook handles Ctrl-C and raises
`Stopped`, a KeyboardInterrupt with the round at which it stopped.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from fedjax_pfl.simulation import multiprocess

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 1.0  # several processes ignore a repeated signal for these seconds


class Stopped(KeyboardInterrupt):
    """Exception of a run that stopped on request, with everything up to `round` saved.

    Args:
      round: Number of finished rounds.
      code: Exit status of the process.
      caller: What to repeat to resume: "command" (of the shell) or "call" (from Python).
    """

    def __init__(self, round: int, code: int, caller: str = "command") -> None:
        super().__init__(f"stopped at round {round}; run the same {caller} again to resume")
        self.round, self.code = round, code


class Stop:
    """Flag that signal handlers set to stop a run, which reads it after each compiled call."""

    def __init__(self, caller: str = "command") -> None:
        self.exit_status = 0  # nonzero: stop with this status
        self.caller = caller  # "command" or "call"
        self._busy = threading.Lock()
        self._requested_at = 0.0

    @property
    def busy(self) -> bool:
        """Returns True while a block of `protected` runs."""
        return self._busy.locked()

    @contextlib.contextmanager
    def protected(self) -> Iterator[None]:
        """Returns a context in which the first signal sets the flag. Outside, it ends the run."""
        with self._busy:
            yield

    def _wait_for_signals(self, read: socket.socket) -> None:
        """Handles the signals whose numbers arrive as bytes in `read`, until it is closed.

        Runs in a thread, because Python runs no handler while XLA compiles.
        """
        while number := read.recv(1):
            if number[0] not in SIGNALS:
                continue
            code, time_now = 128 + number[0], time.monotonic()
            if (
                self.exit_status
                and multiprocess.count() > 1
                and time_now < self._requested_at + ECHO
            ):
                continue  # the same signal, forwarded by another process
            if self.exit_status or self._busy.acquire(blocking=False):
                _print("stopped; run the same command again to resume")
                os._exit(code)
            self.exit_status, self._requested_at = code, time_now
            _print("stopping when this call is saved; once more ends at once")


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal or pipe may be closed
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def on_signals() -> Iterator[Stop]:
    """Returns a context that handles SIGINT and SIGTERM, unless they are ignored; yields the flag.

    The first saves the rounds being computed, the second ends the process. Main thread only.
    """
    stop = Stop()
    read, write = socket.socketpair()
    write.setblocking(False)
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
    wakeup = signal.set_wakeup_fd(write.fileno())
    listener = threading.Thread(target=stop._wait_for_signals, args=(read,), daemon=True)
    listener.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        write.close()
        listener.join()
        read.close()


@contextlib.contextmanager
def on_keyboard(saves: bool) -> Iterator[Stop]:
    """Returns a context that handles Ctrl-C in a call from Python; yields the flag.

    The first saves the rounds being computed, the second raises KeyboardInterrupt. Changes nothing
    if the run saves nothing (`saves` is False), outside the main thread, or if Python does not turn
    Ctrl-C into a KeyboardInterrupt.
    """
    stop = Stop("call")
    is_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (saves and is_main and is_default):
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.exit_status or not stop.busy:
            raise KeyboardInterrupt("stopped; run the same call again to resume")
        stop.exit_status = 128 + number
        _print("stopping when these rounds are saved; once more ends at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
