"""A trial federation on one machine: a SuperLink, and nodes with TLS and keys.

Everything lies in one folder. A process that ends too early is started again. All processes end
with the trial, even if it is killed (`guard`).
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import assembly, guard, keys, node_file, own_state, schema
from fedjax_pfl.deploy.app import HERE
from fedjax_pfl.deploy.flower import NAME, outcome_of
from fedjax_pfl.deploy.run import WIRE

# Of a process that has ended: a SuperNode that was killed is refused until Flower has missed its
# heartbeats for a minute, and each try to start it costs seconds of a core.
_PAUSE = 15.0
_BEGIN = 60.0  # seconds in which the server's app begins after it was asked for
_TRIES = 3  # ends of the server's app, one after the other without a round in between
_SERVER = "flwr-serverapp"  # as Flower calls the process


def run(
    config: Mapping[str, Any],
    workdir: Path,
    folder: Path,
    waiting: Mapping[str, Any],
    tell: Callable[[str], None],
    data: Sequence[str] = (),
) -> None:
    """Runs as many nodes as the configuration has clients, all on this machine.

    Args:
      folder: of certificates, keys, logs, and of each node.
      data: the JSON file of each node; none: each has its part of the configuration's dataset.
    """
    nodes = config["clients"]
    files = [_file_of(i, config, data[i : i + 1]) for i in range(nodes)]
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    with _claimed(folder) as lock:
        authority, certificate, key = keys.certificates(folder)
        ports = free_ports(nodes + 2)
        home = _home(folder, authority, ports[0])
        guard.end(home)  # of a trial that was killed together with its guard
        log = folder / "run.log"
        # Who is who follows from keys alone.
        for old in [log, outcome_of(log), *folder.glob("superlink.db*")]:
            old.unlink(missing_ok=True)
        settings = folder / "settings.json"
        asked = {"config": config, "workdir": str(workdir), "log": str(log), "waiting": waiting}
        settings.write_text(json.dumps(asked))
        tls = ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate]
        tls += ["--ssl-keyfile", key]
        with _Processes(folder, home, lock) as started:
            started.start(
                "superlink",
                *("flower-superlink", *tls, "--enable-supernode-auth", "--host", "127.0.0.1"),
                *("--port", ports[0], "--control-api-address", f"127.0.0.1:{ports[1]}"),
                *("--database", folder / "superlink.db"),
                "--disable-runtime-dependency-installation",
            )
            started.until(ports[0], "superlink")
            for i in range(nodes):
                public = keys.node_key(folder / f"{NAME}{i}.key")
                started.command(
                    "flwr", "supernode", "register", public, "trial", "--name", f"{NAME}{i}"
                )
                own = folder / f"node-{i}", folder / f"node-{i}.json"
                own[1].write_text(json.dumps(files[i]))
                started.start(f"worker-{i}", sys.executable, "-m", "fedjax_pfl.deploy.worker", *own)
                started.start(
                    f"node-{i}",
                    *(sys.executable, "-m", "fedjax_pfl.deploy.supernode", own[0]),
                    *("--superlink", f"127.0.0.1:{ports[0]}"),
                    *("--root-certificates", authority, "--port", ports[2 + i]),
                    *("--auth-supernode-private-key", folder / f"{NAME}{i}.key", *tls),
                )

            def submit() -> None:
                asking = f"settings={json.dumps(str(settings))}"
                started.until(ports[0], "superlink")
                started.command("flwr", "run", HERE, "trial", "--run-config", asking)

            _follow(log, workdir / WIRE, started, submit, tell)


def _file_of(i: int, config: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """Returns the content of node i's file: its owner's, or a part of the configured dataset."""
    if data:
        content = node_file.json_object(Path(data[0]))
    elif ":" in config["dataset"]:
        raise UsageError(
            f"dataset is {config['dataset']}, and a node's own file says what it reads; give "
            "one file for each node as its data"
        )
    else:
        names = (*node_file.OF_DATA, *node_file.SHARED)
        content = {name: config[name] for name in names if config.get(name) is not None}
    content.setdefault("client", i)
    file = node_file.parsed(content, data[0] if data else "the configuration")
    if file.client != i:
        raise UsageError(f"{data[0]} is of client {file.client}, and is given for client {i}")
    content["code"] = [*file.code, *assembly.brought(config).values()]
    return content


def _follow(
    log: Path,
    rounds: Path,
    started: "_Processes",
    submit: Callable[[], None],
    tell: Callable[[str], None],
) -> None:
    """Tells the run's lines until it has an outcome, and restarts processes that end before.

    Args:
      rounds: a file that grows with each of them.
    """
    seen, ends, until, size = 0, 0, 0.0, -1
    while True:
        alive = bool(guard.left(started.home, _SERVER))  # before its outcome is looked for
        outcome = own_state.describe(outcome_of(log), schema.OUTCOME)  # before its last line is
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        lines = text.splitlines(keepends=True)
        for line in lines[seen:]:
            if not line.endswith("\n"):
                break
            seen += 1
            tell(line.rstrip("\n"))
        if "error" in outcome:
            raise UsageError(outcome["error"])
        if outcome:
            return
        for name in started.again():
            tell(f"{name} has ended, and is started again")
        if alive:
            until = 0.0
        elif time.monotonic() > until:
            grown = rounds.stat().st_size if rounds.exists() else 0
            if size >= 0:
                tell("The server's app has ended, and is started again")
            ends, size = (ends + 1 if grown == size else 0), grown
            if ends > _TRIES:
                raise UsageError(
                    f"the server's app has ended {ends} times without a round between; see "
                    f"{started.folder / 'superlink.log'}"
                )
            submit()
            until = time.monotonic() + _BEGIN
        time.sleep(0.5)


@contextlib.contextmanager
def _claimed(folder: Path, seconds: float = 30.0) -> Iterator[int]:
    """Locks the folder; processes of an earlier trial may still be ending."""
    held = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UsageError(
                        f"{folder} is in use by another trial; end that, or choose another folder"
                    ) from None
                time.sleep(0.2)
        yield held
    finally:
        os.close(held)


class _Processes:
    """Started processes, each in a session of its own; a guard ends them."""

    def __init__(self, folder: Path, home: Path, lock: int) -> None:
        self.folder, self.home = folder, home
        self.running = dict[str, subprocess.Popen[bytes]]()
        self.words, self.at = dict[str, tuple[Any, ...]](), dict[str, float]()
        self.restarted = set[str]()
        self.guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(home)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[lock],  # so that nobody else begins while it is ending
        )
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            # A method of one's own lies where the command is given.
            "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.guard.communicate()
        for one in self.running.values():
            one.wait()

    def start(self, name: str, *words: Any) -> None:
        """Starts a process whose output goes to a file of its name."""
        self.words[name], self.at[name] = words, time.monotonic()
        with open(self.folder / f"{name}.log", "ab") as out:
            self.running[name] = subprocess.Popen(
                [str(word) for word in words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, *words: Any) -> None:
        """Runs a command to its end."""
        done = subprocess.run(
            [str(word) for word in words], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[-400:]
            raise UsageError(f"{' '.join(map(str, words[:3]))} failed: {said}")

    def again(self) -> list[str]:
        """Restarts ended processes; returns the names of those that did not end at once again."""
        now = time.monotonic()
        ended = [name for name, one in self.running.items() if one.poll() is not None]
        due = {name: self.at[name] for name in ended if now > self.at[name] + _PAUSE}
        for name in due:
            self.start(name, *self.words[name])
        at_once = {name for name in self.restarted & set(due) if now <= due[name] + 2 * _PAUSE}
        self.restarted |= set(due)
        return [name for name in due if name not in at_once]

    def until(self, port: int, name: str, seconds: float = 120.0) -> None:
        """Waits until a process listens on a port."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            one = self.running[name]
            if one.poll() is not None:
                raise UsageError(
                    f"{name} has ended with status {one.returncode}; see "
                    f"{self.folder / f'{name}.log'}"
                )
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.2)
        raise UsageError(f"{name} does not listen after {seconds:.0f} s; see {self.folder}")


def free_ports(count: int) -> list[int]:
    """Returns free ports of the loopback device."""
    with contextlib.ExitStack() as kept:
        held = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def _home(folder: Path, authority: Path, port: int) -> Path:
    """Makes a home for Flower's commands, with a connection named trial."""
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    lines = ["[superlink]", 'default = "trial"', "", "[superlink.trial]"]
    lines += [f'address = "127.0.0.1:{port}"', f"root-certificates = {json.dumps(str(authority))}"]
    (home / "config.toml").write_text("\n".join(lines) + "\n")
    return home


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Lets SIGTERM act like Ctrl-C, so that started processes end too."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
