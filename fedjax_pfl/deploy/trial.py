"""A trial federation on one machine: a Flower SuperLink and nodes, with TLS and node keys.

All files are in one folder. A process that ends early is restarted. All processes end with the
trial, even if the trial is killed (see `guard`).
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
from fedjax_pfl.deploy import assembly, guard, keys, node_file, schema, storage
from fedjax_pfl.deploy.app import APP_FOLDER
from fedjax_pfl.deploy.flower import NODE_PREFIX, outcome_path
from fedjax_pfl.deploy.run import WIRE_FILE
from fedjax_pfl.report import run_reader
from fedjax_pfl.settings.general import settings_with

# Delay before a restart. Flower refuses a killed SuperNode for a minute, and each attempt costs
# seconds of CPU time.
_RESTART_SECONDS = 15.0
_START_SECONDS = 60.0  # time for the server's app to start
_MAX_RESTARTS = 3  # restarts of the server's app without a finished round in between
_SERVER_PROCESS = "flwr-serverapp"  # Flower's name of the process


def run(
    config: Mapping[str, Any],
    workdir: Path,
    folder: Path,
    waiting: Mapping[str, Any],
    log: Callable[[str], None],
    data: Sequence[str] = (),
) -> None:
    """Runs a configuration with one node per client, all on this machine.

    Args:
      config: Settings as JSON data.
      workdir: Run directory; a run that was stopped there is resumed.
      folder: Folder for certificates, keys, logs, and the folders of the nodes.
      waiting: Fields of `exchange.Waiting`.
      log: Called with each line of the run's log.
      data: Path of each node's JSON file; if empty, the nodes share the configuration's dataset.
    """
    nodes = config["clients"]
    files = [_node_settings(i, config, data[i : i + 1]) for i in range(nodes)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used ({error.strerror}); choose --folder") from None
    with _locked(folder) as lock:
        _check_data_of_finished_run(workdir, folder, files)
        authority, certificate, key = keys.ensure_certificates(folder)
        ports = free_ports(nodes + 1)
        home = _write_flower_home(folder, authority, ports[0])
        guard.end_processes(home)  # Left over if a trial was killed together with its guard.
        log_path = folder / "run.log"
        # Without Flower's old database, nodes are identified by their keys only.
        for old_file in [log_path, outcome_path(log_path), *folder.glob("superlink.db*")]:
            old_file.unlink(missing_ok=True)
        settings = folder / "settings.json"
        paths = {"workdir": str(workdir), "log": str(log_path)}
        spec = {"config": config, "complete": True, "waiting": waiting, **paths}
        settings.write_text(json.dumps(spec))
        tls = ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate]
        tls += ["--ssl-keyfile", key]
        with _Processes(folder, home, lock) as processes:
            processes.start(
                "superlink",
                *(sys.executable, "-m", "fedjax_pfl.deploy.superlink", *tls),
                *("--port", ports[0], "--database", folder / "superlink.db"),
            )
            processes.wait_for_port(ports[0], "superlink")
            for i in range(nodes):
                public = keys.ensure_node_key(folder / f"{NODE_PREFIX}{i}.key")
                processes.command(
                    "flwr", "supernode", "register", public, "trial", "--name", f"{NODE_PREFIX}{i}"
                )
                node_paths = folder / f"node-{i}", folder / f"node-{i}.json"
                node_paths[1].write_text(json.dumps(files[i]))
                processes.start(
                    f"worker-{i}", sys.executable, "-m", "fedjax_pfl.deploy.worker", *node_paths
                )
                processes.start(
                    f"node-{i}",
                    *(sys.executable, "-m", "fedjax_pfl.deploy.supernode", node_paths[0]),
                    *("--superlink", f"127.0.0.1:{ports[0]}"),
                    *("--root-certificates", authority, "--port", ports[1 + i]),
                    *("--auth-supernode-private-key", folder / f"{NODE_PREFIX}{i}.key", *tls),
                )

            def submit() -> None:
                run_config = f"settings={_toml_text(settings)}"
                processes.wait_for_port(ports[0], "superlink")
                processes.command("flwr", "run", APP_FOLDER, "trial", "--run-config", run_config)

            _follow(log_path, workdir / WIRE_FILE, processes, submit, log)


def _check_data_of_finished_run(
    workdir: Path, folder: Path, files: Sequence[Mapping[str, Any]]
) -> None:
    """Raises UsageError if `workdir` has a finished run of nodes with other data.

    Nodes refuse other data themselves, but a finished run asks none. `files` has the contents of
    the node files, `folder` those of the run.
    """
    if not (workdir / run_reader.REPORT).exists():
        return
    may_differ = settings_with("resumable")
    for i, content in enumerate(files):
        path = folder / f"node-{i}.json"
        old = node_file.json_object(path) if path.exists() else content
        new = json.loads(json.dumps(content))
        if any(old.get(k) != new.get(k) for k in {*old, *new}.difference(may_differ)):
            raise UsageError(
                f"{workdir} holds a finished run in which client {i} had other data; choose "
                "another workdir"
            )


def _node_settings(i: int, config: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """Returns the content of client `i`'s node file.

    `data` has the path of a node file, or is empty: the node uses its part of the run's dataset.
    """
    if data:
        content = node_file.json_object(Path(data[0]))
    elif ":" in config["dataset"]:
        raise UsageError(
            f"dataset is {config['dataset']}, which a node reads from its own file; give one file "
            "for each node as its data"
        )
    else:
        names = (*node_file.DATA_SETTINGS, *node_file.SHARED_SETTINGS)
        content = {name: config[name] for name in names if config.get(name) is not None}
    content.setdefault("client", i)
    file = node_file.parse(content, data[0] if data else "the configuration")
    if file.client != i:
        raise UsageError(f"{data[0]} has client {file.client}, and is given for client {i}")
    content["code"] = [*file.code, *assembly.user_code(config).values()]
    return content


def _follow(
    log_path: Path,
    wire_file: Path,
    processes: "_Processes",
    submit: Callable[[], None],
    log: Callable[[str], None],
) -> None:
    """Logs the run's lines until it has an outcome, and restarts processes that end before.

    `wire_file` grows with each finished round, and `submit` starts the server's app. Raises
    UsageError if the outcome is an error, or if the server's app keeps ending.
    """
    lines_seen, restarts, next_start, size_at_start = 0, 0, 0.0, -1
    while True:
        # In this order: an app that ends writes its last line, its outcome, and then exits.
        alive = bool(guard.running_processes(processes.home, _SERVER_PROCESS))
        outcome = storage.read_json(outcome_path(log_path), schema.OUTCOME)
        text = log_path.read_text(encoding="utf-8") if log_path.exists() else ""
        lines = text.splitlines(keepends=True)
        for line in lines[lines_seen:]:
            if not line.endswith("\n"):
                break
            lines_seen += 1
            log(line.rstrip("\n"))
        if "error" in outcome:
            raise UsageError(outcome["error"])
        if outcome:
            return
        for name in processes.restart_ended():
            log(f"{name} has ended; restarting it")
        if alive:
            next_start = 0.0
        elif time.monotonic() > next_start:
            size = wire_file.stat().st_size if wire_file.exists() else 0
            if size_at_start >= 0:
                log("The server's app has ended; restarting it")
            restarts, size_at_start = (restarts + 1 if size == size_at_start else 0), size
            if restarts > _MAX_RESTARTS:
                raise UsageError(
                    f"the server's app has ended {restarts} times without finishing a round; see "
                    f"{processes.folder / 'superlink.log'}"
                )
            submit()
            next_start = time.monotonic() + _START_SECONDS
        time.sleep(0.5)


@contextlib.contextmanager
def _locked(folder: Path, seconds: float = 30.0) -> Iterator[int]:
    """Locks the trial's folder; yields the descriptor that holds the lock.

    Waits up to `seconds` while processes of an earlier trial are ending, then raises UsageError.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"{folder} is in use by another trial; end it, or use another folder"
                    ) from None
                time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


class _Processes:
    """Processes of a trial, each in its own session, and the guard that ends them.

    Args:
      folder: Folder of the trial, with the logs.
      home: Flower's folder, FLWR_HOME of the processes.
      lock: Descriptor of the lock of the trial's folder.
    """

    def __init__(self, folder: Path, home: Path, lock: int) -> None:
        self.folder, self.home = folder, home
        self.running = dict[str, subprocess.Popen[bytes]]()
        self.arguments, self.started_at = dict[str, tuple[Any, ...]](), dict[str, float]()
        self.restarted = set[str]()
        self.guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(home)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[lock],  # keeps the folder locked until the guard is done
        )
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            # User-defined methods are in the current folder.
            "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the guard end all processes, and waits until they have ended."""
        self.guard.communicate()
        for process in self.running.values():
            process.wait()

    def start(self, name: str, *arguments: Any) -> None:
        """Starts a process with this command line; its output is appended to NAME.log."""
        self.arguments[name], self.started_at[name] = arguments, time.monotonic()
        with open(self.folder / f"{name}.log", "ab") as out:
            self.running[name] = subprocess.Popen(
                [str(word) for word in arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self, *arguments: Any) -> None:
        """Runs a command and waits; raises UsageError if it fails."""
        completed = subprocess.run(
            [str(word) for word in arguments], env=self.environment, capture_output=True, text=True
        )
        if completed.returncode:
            output = " ".join((completed.stderr or completed.stdout).split())[-400:]
            raise UsageError(f"{' '.join(map(str, arguments[:3]))} failed: {output}")

    def restart_ended(self) -> list[str]:
        """Restarts processes that have ended.

        Returns the names of restarted processes, without those that end again after each restart.
        """
        names = []
        for name, process in self.running.items():
            seconds = time.monotonic() - self.started_at[name]
            if process.poll() is not None and seconds > _RESTART_SECONDS:
                self.start(name, *self.arguments[name])
                if name not in self.restarted or seconds > 2 * _RESTART_SECONDS:
                    names.append(name)
                self.restarted.add(name)
        return names

    def wait_for_port(self, port: int, name: str, seconds: float = 120.0) -> None:
        """Waits until the process `name` listens at `port` of this machine.

        Raises UsageError if the process ends, or does not listen within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            process = self.running[name]
            if process.poll() is not None:
                raise UsageError(
                    f"{name} has ended with status {process.returncode}; see "
                    f"{self.folder / f'{name}.log'}"
                )
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.2)
        raise UsageError(f"{name} does not listen after {seconds:.0f} s; see {self.folder}")


def free_ports(count: int) -> list[int]:
    """Returns `count` different free ports of the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def _write_flower_home(folder: Path, authority: Path, port: int) -> Path:
    """Writes Flower's configuration in the trial's folder; returns Flower's folder.

    Its connection `trial` has the SuperLink's port and the certificate of its authority.
    """
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "trial"\n\n[superlink.trial]\naddress = "127.0.0.1:{port}"\n'
        f"root-certificates = {_toml_text(authority)}\n",
        encoding="utf-8",
    )
    return home


def _toml_text(path: Path) -> str:
    """Returns a path as text in TOML, which refuses JSON's escapes of emoji."""
    return json.dumps(str(path), ensure_ascii=False)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGTERM in its context, so the trial ends its processes."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
