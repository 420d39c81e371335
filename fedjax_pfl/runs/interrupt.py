"""Ctrl-C and SIGTERM: a first one lets what is being computed be saved, a second one ends at once.

Commands listen to both; a call from Python or a notebook ends at Ctrl-C as a command does, with a
KeyboardInterrupt that says where it stands.
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
ECHO = 1.0  # seconds in which, among several processes, a second signal is still the first one


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and everything up to `round` is saved."""

    def __init__(self, round: int, code: int, what: str = "command") -> None:
        super().__init__(f"stopped at round {round}; the same {what} goes on from there")
        self.round, self.code = round, code


class Stop:
    """Whether to stop; nobody asks, unless `on_signals` or `on_keyboard` listens."""

    def __init__(self, call: str = "command") -> None:
        self.asked = 0  # with which exit status
        self.call = call  # what is given again to go on
        self._busy = threading.Lock()
        self._when = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is being done that is done to its end."""
        return self._busy.locked()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is done here is done to its end; elsewhere a signal ends the process at once."""
        with self._busy:
            yield

    def _wait_for_signals(self, read: socket.socket) -> None:
        """In a thread of its own, because Python runs no handler while XLA compiles."""
        while number := read.recv(1):
            if number[0] not in SIGNALS:
                continue
            code, now = 128 + number[0], time.monotonic()
            if self.asked and multiprocess.count() > 1 and now < self._when + ECHO:
                continue  # it was sent to all, and passed on as well
            if self.asked or self._busy.acquire(blocking=False):
                _say("stopped; the same command goes on from what is saved")
                os._exit(code)
            self.asked, self._when = code, now
            _say("stopping when this call is saved; once more ends at once")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal or pipe may be closed
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def on_signals() -> Iterator[Stop]:
    """Listen, in the main thread, to those of the two that are not ignored."""
    stop = Stop()
    read, write = socket.socketpair()
    write.setblocking(False)
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    wakeup = signal.set_wakeup_fd(write.fileno())
    listener = threading.Thread(target=stop._wait_for_signals, args=(read,), daemon=True)
    listener.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        write.close()
        listener.join()
        read.close()


@contextlib.contextmanager
def on_keyboard(saves: bool) -> Iterator[Stop]:
    """Ctrl-C in a call from Python: the first saves what is being computed, a second ends at once.

    Nothing changes where Python does not turn Ctrl-C into a KeyboardInterrupt, nor in a thread
    other than the main one.

    Args:
      saves: whether the run has a directory; without one it ends at once.
    """
    stop = Stop("call")
    here = threading.current_thread() is threading.main_thread()
    if not saves or not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked or not stop.busy:
            raise KeyboardInterrupt("stopped; the same call goes on from what is saved")
        stop.asked = 128 + number
        _say("stopping when these rounds are saved; once more ends at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
