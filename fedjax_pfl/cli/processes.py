"""Several processes that compute one run, and one line about how they ended.

The process that starts them computes nothing. It forwards signals, waits, and reads the last line
and the output of each worker. Otherwise, if one process is gone, JAX ends the others with a page
of text.
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

from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.runs import interrupt
from fedjax_pfl.simulation import multiprocess
from fedjax_pfl.simulation.devices import cores

GONE = 75  # exit status: another process is gone
_HEARTBEAT = 10  # seconds without a heartbeat after which JAX treats a process as dead
_GRACE = 12.0  # seconds for the other processes to notice that one has ended
_JOINING = "joining"


class ProcessOptions(NamedTuple):
    """The flags --processes, --process, --coordinator and --wait, for runs of several processes."""

    processes: int = 1  # number of all processes of the run
    process: int | None = None  # number of this process, from 0; None: start all here
    coordinator: str | None = None  # HOST:PORT of process 0, "auto": by the cluster; None: here
    wait: int = 300  # seconds that processes may take to join


class Worker(NamedTuple):
    """A child process that computes a part of a run, as seen by its parent."""

    number: int | None  # None: the cluster assigns it
    pid: int
    last_line: IO[bytes]  # temporary file for its error message; empty without an error
    output: IO[bytes]  # temporary file: output of libraries, and of processes but 0


class End(NamedTuple):
    """How a worker ended."""

    number: int | None  # as in `Worker`
    code: int  # exit status; negative: the signal that ended it
    last_line: str  # its error message, or ""
    output: str  # contents of `Worker.output`


@contextlib.contextmanager
def run_in_processes(options: ProcessOptions) -> Iterator[None]:
    """Context that forks the processes of a run; each runs the body of the with statement and ends.

    The process that starts them does not run the body. It exits when they have ended, with the
    status of `verdict`. A run of one process runs the body in this process and continues after it.
    Raises UsageError on a system that cannot fork.
    """
    numbers = local_numbers(options)
    if not numbers:
        yield
        return
    if not hasattr(os, "fork"):
        raise UsageError("several processes need a system that can fork")
    address = options.coordinator or f"127.0.0.1:{_free_port()}"
    alive = os.pipe()  # nothing is written to it; reading ends when this process does
    workers = []
    sys.stdout.flush()
    for number in numbers:
        last_line, output = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        pid = os.fork()
        if pid:
            workers.append(Worker(number=number, pid=pid, last_line=last_line, output=output))
            continue
        os.close(alive[1])
        threading.Thread(target=_end_with, args=(alive[0],), daemon=True).start()
        code, line = 1, ""
        try:
            terminal = [os.dup(fd) for fd in (1, 2)]
            for fd in (1, 2):  # output of libraries goes to a file
                os.dup2(output.fileno(), fd)
            _write_line(last_line, _JOINING)
            with _ended_by_signals():
                _join(options, number, address, len(numbers))
            _write_line(last_line, "")
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
            code, line = GONE, first_line(error)[:200]
            traceback.print_exc(file=os.fdopen(2, "w"))
        except BaseException:
            traceback.print_exc()
        finally:  # without waiting for the others, as a proper end would
            _write_line(last_line, line)
            os._exit(code)
    line, code = verdict(_wait_for(workers), options, address)
    if line:
        print(line, file=sys.stderr)
    sys.exit(code)


def local_numbers(options: ProcessOptions) -> Sequence[int | None]:
    """Returns the numbers of the processes to fork on this machine.

    [] if this process computes the whole run itself, [None] if the cluster assigns the number.
    Raises a UsageError for flags that do not fit together.
    """
    if options.coordinator == "auto":
        if options.process is not None or options.processes != 1:
            raise UsageError("with --coordinator=auto, --processes and --process are the cluster's")
        return [None]
    if options.coordinator is None and options.process is None:
        return range(options.processes) if options.processes > 1 else []
    if options.coordinator is None or options.process is None or options.processes < 2:
        raise UsageError(
            "where each machine starts its own process, --coordinator=HOST:PORT, --processes and "
            "--process go together; on one machine --processes alone starts them all"
        )
    if options.process >= options.processes:
        raise UsageError(f"--process is {options.process}; choose 0 to {options.processes - 1}")
    if not re.fullmatch(r".+:\d{1,5}", options.coordinator):
        raise UsageError(
            f"--coordinator is {options.coordinator!r}, no HOST:PORT such as node1:9876"
        )
    return [options.process]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# In a worker.


def _end_with(pipe: int) -> None:
    """Waits until the parent process, which holds the other end of `pipe`, ends; then exits."""
    os.read(pipe, 1)
    os._exit(GONE)


def _write_line(file: IO[bytes], line: str) -> None:
    """Replaces the content of a file by a line."""
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), line.encode(), 0)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Context where signals end the process at once: Python runs no handler while JAX waits."""
    numbers = [n for n in interrupt.SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _join(options: ProcessOptions, number: int | None, address: str, local: int) -> None:
    """Connects this process to the others by jax.distributed.initialize, before JAX finds devices.

    `number` is None if the cluster assigns it; `address` is HOST:PORT of process 0; `local` is the
    number of processes of this run that share the cores of this machine. Raises UsageError if no
    cluster is found.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    limits: Any = {"initialization_timeout": options.wait, "heartbeat_timeout_seconds": _HEARTBEAT}
    if number is None:
        try:
            jax.distributed.initialize(**limits)
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"no cluster is found ({first_line(error)}); give --coordinator=HOST:PORT, "
                "--processes and --process"
            ) from error
        return
    if local > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(1, cores() // local))
    port = int(address.rpartition(":")[2])
    # Processes of one machine listen on no other address.
    bound = address if options.coordinator is None else f"{_any_address()}:{port}"
    if number == 0:
        _check_free(port)
    else:
        _reach(address, options.wait)
    jax.distributed.initialize(
        address,
        options.processes,
        number,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bound,
        **limits,
    )


def _any_address() -> str:
    """Returns the host to listen on at all addresses: "[::]", or "0.0.0.0" without IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
        return "[::]"
    except OSError:
        return "0.0.0.0"


def _check_free(port: int) -> None:
    """Raises a UsageError if process 0 cannot listen on a port; JAX would crash."""
    host = _any_address()
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} cannot be listened on ({first_line(error)})") from error


def _reach(address: str, seconds: float) -> None:
    """Waits until process 0 answers at HOST:PORT; raises a UsageError after `seconds`."""
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
                    f"({first_line(error)}); start it, or give its address"
                ) from error
        time.sleep(0.2)


# In the process that started the workers.


def _wait_for(workers: Sequence[Worker]) -> list[End]:
    """Waits until all workers have ended, and returns how; forwards signals to them meanwhile.

    If one fails, those that still run 12 seconds later are killed.
    """
    left = {worker.pid: worker for worker in workers}
    ends, deadline = [], None

    def forward(number: int, _: Any) -> None:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in interrupt.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            worker, code = left.pop(pid), os.waitstatus_to_exitcode(status)
            ends.append(
                End(
                    number=worker.number,
                    code=code,
                    last_line=_text(worker.last_line),
                    output=_text(worker.output),
                )
            )
            if code and deadline is None:
                deadline = time.monotonic() + _GRACE
        elif deadline and time.monotonic() > deadline:
            for worker in left.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                ends.append(
                    End(
                        number=worker.number,
                        code=GONE,
                        last_line="it waited for the others",
                        output="",
                    )
                )
            left.clear()
        else:
            time.sleep(0.05)
    return ends


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_UNHEALTHY = re.compile(r"stopped sending heartbeats\):\s*((?:\d+\s+)+)")


def _as_stopped(end: End) -> End:
    """Returns the end of a worker, with status 128 + signal if SIGINT or SIGTERM killed it."""
    if -end.code not in interrupt.SIGNALS:
        return end
    return end._replace(code=128 - end.code, last_line="stopped before the first round")


def verdict(ends: Sequence[End], options: ProcessOptions, address: str) -> tuple[str, int]:
    """Returns the error message for the user, "" if no worker failed, and the exit status."""

    def of(end: End) -> str:
        return "" if end.number is None else f" {end.number} of {options.processes}"

    resume = "so this run ends; give the same command again to resume"
    by_number = sorted(map(_as_stopped, ends), key=lambda end: end.number or 0)
    lead = by_number[0]
    if not any(end.code for end in ends):
        return "", 0
    for end in by_number:
        if end.code == 2:  # the others may report the same
            return f"error: {end.last_line}" + (f" (process{of(end)})" if end.number else ""), 2
    for end in by_number:
        if end.code < 0 and end.code != -signal.SIGABRT:
            name = signal.Signals(-end.code).name
            return f"process{of(end)} was killed ({name}), {resume}", GONE
    stopped = [end for end in by_number if end.code in {128 + n for n in interrupt.SIGNALS}]
    if len(stopped) == len(ends):
        return lead.last_line, lead.code
    if stopped:
        name = signal.Signals(stopped[0].code - 128).name
        return f"process{of(stopped[0])} was stopped ({name}), {resume}", stopped[0].code
    lost = [end for end in by_number if end.code == GONE or "JAX distributed service" in end.output]
    for end in lost:
        if end.last_line == _JOINING:
            joined = f"not all of the {options.processes} processes have joined at {address}"
            if options.coordinator == "auto":
                joined = "not all processes of the cluster have joined"
            return (
                f"error: {joined} in {options.wait} s; start the others, or wait for them "
                "longer with --wait"
            ), 2
    for end in by_number:
        if end.code and end not in lost:
            last = "\n".join(end.output.strip().splitlines()[-30:])
            return f"{last}\nprocess{of(end)} has crashed ({end.code}), {resume}".strip(), 1
    for end in lost:
        if match := _UNHEALTHY.search(end.output):
            return f"process {', '.join(match[1].split())} is gone, {resume}", GONE
        if "Failed to send RPC to coordination service" in end.output:
            return f"process 0 is gone, {resume}", GONE
    why = next((f" ({end.last_line})" for end in lost if end.last_line), "")
    return f"another process is gone{why}, {resume}", GONE
