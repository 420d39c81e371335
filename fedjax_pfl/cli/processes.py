"""Starting several processes that compute one run, and saying in a line what became of them.

The process that starts them computes nothing. It passes signals on, waits, and reads what they
leave behind: JAX ends a process at once, with a page of text, when another one is gone.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import interrupt
from fedjax_pfl.simulation import multiprocess
from fedjax_pfl.simulation.devices import cores

GONE = 75  # exit status: another process is gone
_HEARTBEAT = 10  # seconds without a sign of life after which JAX takes a process for dead
_GRACE = 12.0  # seconds in which the others find out themselves that one has ended
_JOINING = "joining"


class Given(NamedTuple):
    """What the flags say."""

    processes: int = 1
    process: int | None = None  # where each machine starts its own
    coordinator: str | None = None  # HOST:PORT of process 0, or auto
    wait: int = 300  # seconds for all to come


class Worker(NamedTuple):
    """A process that computes, as the one that started it sees it."""

    number: int | None  # None: the cluster knows
    pid: int
    word: IO[bytes]  # its last line, or that it is joining
    noise: IO[bytes]  # what libraries print, and all that processes other than the first say


class End(NamedTuple):
    """What one of them has left behind."""

    number: int | None
    code: int  # negative: the signal that ended it
    word: str
    noise: str


@contextlib.contextmanager
def together(given: Given) -> Iterator[None]:
    """What is in here is done in each process of the run, and ends with it.

    Whoever started them does not come here, but exits when they have, with their status.
    """
    numbers = started_here(given)
    if not numbers:
        yield
        return
    if not hasattr(os, "fork"):
        raise UsageError("several processes need a system that can fork, which this one cannot")
    address = given.coordinator or f"127.0.0.1:{_free_port()}"
    alive = os.pipe()  # into which nobody writes: it ends with whoever holds its other end
    workers = []
    sys.stdout.flush()
    for number in numbers:
        word, noise = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (both outlive it)
        pid = os.fork()
        if pid:
            workers.append(Worker(number, pid, word, noise))
            continue
        os.close(alive[1])
        threading.Thread(target=_end_with, args=(alive[0],), daemon=True).start()
        code, line = 1, ""
        try:
            terminal = _into(noise)
            _tell(word, _JOINING)
            with _ended_by_signals():
                _join(given, number, address, len(numbers))
            _tell(word, "")
            if multiprocess.lead():
                sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in terminal)
            yield
            sys.stdout.flush()
            jax.distributed.shutdown()  # waits for the others
            code = 0
        except UsageError as error:
            code, line = 2, " ".join(str(error).split())
            if isinstance(error, multiprocess.AgreedError):
                jax.distributed.shutdown()
        except interrupt.Stopped as stopped:
            code, line = stopped.code, str(stopped)
            jax.distributed.shutdown()  # waits for process 0, which saves
        except jax.errors.JaxRuntimeError as error:
            code, line = GONE, str(error).splitlines()[0][:200]
            traceback.print_exc(file=os.fdopen(2, "w"))
        except BaseException:
            traceback.print_exc()
        finally:  # and at once: a proper end would wait for the others
            _tell(word, line)
            os._exit(code)
    line, code = verdict(_waited_for(workers), given, address)
    if line:
        print(line, file=sys.stderr)
    sys.exit(code)


def started_here(given: Given) -> Sequence[int | None]:
    """Which processes this command starts; none where it computes itself. Or UsageError."""
    if given.coordinator == "auto":
        if given.process is not None or given.processes != 1:
            raise UsageError("with --coordinator=auto, --processes and --process are the cluster's")
        return [None]
    if given.coordinator is None and given.process is None:
        return range(given.processes) if given.processes > 1 else []
    if given.coordinator is None or given.process is None or given.processes < 2:
        raise UsageError(
            "where each machine starts its own process, --coordinator=HOST:PORT, --processes and "
            "--process go together; on one machine --processes alone starts them all"
        )
    if given.process >= given.processes:
        raise UsageError(f"--process is {given.process}; choose 0 to {given.processes - 1}")
    if not re.fullmatch(r".+:\d{1,5}", given.coordinator):
        raise UsageError(f"--coordinator is {given.coordinator!r}, no HOST:PORT such as node1:9876")
    return [given.process]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# In a process that computes.


def _end_with(pipe: int) -> None:
    """End when whoever started this process does."""
    os.read(pipe, 1)
    os._exit(GONE)


def _into(noise: IO[bytes]) -> list[int]:
    """Send what is written to the terminal into a file; returns the terminal."""
    terminal = [os.dup(fd) for fd in (1, 2)]
    for fd in (1, 2):
        os.dup2(noise.fileno(), fd)
    return terminal


def _tell(word: IO[bytes], line: str) -> None:
    os.ftruncate(word.fileno(), 0)
    os.pwrite(word.fileno(), line.encode(), 0)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """At once, because Python runs no handler while JAX waits for the others."""
    heard = [n for n in interrupt.SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in heard}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _join(given: Given, number: int | None, address: str, local: int) -> None:
    """Become one of the processes, before JAX looks for devices."""
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for its own
    limits: Any = {
        "initialization_timeout": given.wait,
        "heartbeat_timeout_seconds": _HEARTBEAT,
    }
    if number is None:
        try:
            jax.distributed.initialize(**limits)
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"no cluster is found ({_first_line(error)}); give --coordinator=HOST:PORT, "
                "--processes and --process"
            ) from error
        return
    if local > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(1, cores() // local))
    port = int(address.rpartition(":")[2])
    # One machine's processes are nobody else's business.
    bound = address if given.coordinator is None else f"{_everywhere()}:{port}"
    if number == 0:
        _check_free(port)
    else:
        _reach(address, given.wait)
    jax.distributed.initialize(
        address,
        given.processes,
        number,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bound,
        **limits,
    )


def _everywhere() -> str:
    """All addresses of this machine, which may have no IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::", 0))
        return "[::]"
    except OSError:
        return "0.0.0.0"


def _check_free(port: int) -> None:
    """UsageError where process 0 cannot listen; JAX would crash."""
    host = _everywhere()
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} cannot be listened on ({_first_line(error)})") from error


def _reach(address: str, seconds: float) -> None:
    """UsageError where process 0 cannot be reached in time; JAX would not say what is wrong."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > end:
                raise UsageError(
                    f"process 0 cannot be reached at {address} for {seconds:.0f} s "
                    f"({_first_line(error)}); start it, or give its address"
                ) from error
        time.sleep(0.2)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# In the process that started them.


def _waited_for(workers: Sequence[Worker]) -> list[End]:
    """All their ends; where one fails, the others have some seconds, and then are killed."""
    left = {worker.pid: worker for worker in workers}
    ends, deadline = [], None

    def pass_on(number: int, _: Any) -> None:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in interrupt.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            worker, code = left.pop(pid), os.waitstatus_to_exitcode(status)
            ends.append(End(worker.number, code, _text(worker.word), _text(worker.noise)))
            if code and deadline is None:
                deadline = time.monotonic() + _GRACE
        elif deadline and time.monotonic() > deadline:
            for worker in left.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                ends.append(End(worker.number, GONE, "it waited for the others", ""))
            left.clear()
        else:
            time.sleep(0.05)
    return ends


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_UNHEALTHY = re.compile(r"stopped sending heartbeats\):\s*((?:\d+\s+)+)")


def _asked(end: End) -> End:
    """Where a signal came before anybody listened to it, as if it had been listened to."""
    if -end.code not in interrupt.SIGNALS:
        return end
    return end._replace(code=128 - end.code, word="stopped before the first round")


def verdict(ends: Sequence[End], given: Given, address: str) -> tuple[str, int]:
    """The line that is said about their ends, and the exit status."""

    def of(end: End) -> str:
        return "" if end.number is None else f" {end.number} of {given.processes}"

    go_on = "so this run ends; the same command goes on from what is saved"
    by_number = sorted(map(_asked, ends), key=lambda end: end.number or 0)
    lead = by_number[0]
    if not any(end.code for end in ends):
        return "", 0
    for end in by_number:
        if end.code == 2:  # the others may say the same
            return f"error: {end.word}" + (f" (process{of(end)})" if end.number else ""), 2
    for end in by_number:
        if end.code < 0 and end.code != -signal.SIGABRT:
            name = signal.Signals(-end.code).name
            return f"process{of(end)} was killed ({name}), {go_on}", GONE
    stopped = [end for end in by_number if end.code in {128 + n for n in interrupt.SIGNALS}]
    if len(stopped) == len(ends):
        return lead.word, lead.code
    if stopped:
        name = signal.Signals(stopped[0].code - 128).name
        return f"process{of(stopped[0])} was stopped ({name}), {go_on}", stopped[0].code
    lost = [end for end in by_number if end.code == GONE or "JAX distributed service" in end.noise]
    for end in lost:
        if end.word == _JOINING:
            all_of_them = f"all of the {given.processes} processes have come to {address}"
            if given.coordinator == "auto":
                all_of_them = "all processes of the cluster have come"
            return (
                f"error: not {all_of_them} in {given.wait} s; start the others, or wait for them "
                "longer with --wait"
            ), 2
    for end in by_number:
        if end.code and end not in lost:
            last = "\n".join(end.noise.strip().splitlines()[-30:])
            return f"{last}\nprocess{of(end)} has crashed ({end.code}), {go_on}".strip(), 1
    for end in lost:
        if found := _UNHEALTHY.search(end.noise):
            return f"process {', '.join(found[1].split())} is gone, {go_on}", GONE
        if "Failed to send RPC to coordination service" in end.noise:
            return f"process 0 is gone, {go_on}", GONE
    why = next((f" ({end.word})" for end in lost if end.word), "")
    return f"another process is gone{why}, {go_on}", GONE
