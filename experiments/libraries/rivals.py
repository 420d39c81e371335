"""Other implementations, each run in its own process through an adapter."""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.core.errors import UsageError

ADAPTERS = Path(__file__).parents[2] / "third_party"


class Gone(Exception):
    """A rival cannot do the work, ended or does not answer; the message is one line."""


class Rival(NamedTuple):
    """Another implementation and its adapter."""

    name: str
    script: str  # the adapter
    repository: str
    known_file: str  # a file that every checkout has
    items: tuple[str, ...]  # workloads that it can run


_FEDAVG = ("lenet-10", "lenet-100", "lenet-1000", "mlp")
_PFEDLA = ("pfedla", "pfedla-100", "pfedla-500", "pfedla-1000")
TORCH = Rival(
    name="PyTorch loop",
    script="torch_loop.py",
    repository="",
    known_file="",
    items=(*_FEDAVG, "resnet9", "simulation"),
)
RIVALS = {
    "pfedhn": Rival(
        name="the authors' pFedHN",
        script="rival_pfedhn.py",
        repository="AvivSham/pFedHN",
        known_file="experiments/pfedhn/trainer.py",
        items=("pfedhn",),
    ),
    "fl_bench": Rival(
        name="FL-bench",
        script="rival_fl_bench.py",
        repository="KarhouTam/FL-bench",
        known_file="src/server/pfedla.py",
        items=(*_FEDAVG, *_PFEDLA, "simulation"),
    ),
    "pfllib": Rival(
        name="PFLlib",
        script="rival_pfllib.py",
        repository="TsingZ0/PFLlib",
        known_file="system/flcore/servers/serveravg.py",
        items=_FEDAVG,
    ),
    "fedjax": Rival(
        name="FedJAX",
        script="rival_fedjax.py",
        repository="google/fedjax",
        known_file="fedjax/algorithms/fed_avg.py",
        items=_FEDAVG,
    ),
}
NAMES = {"torch": TORCH.name, **{key: rival.name for key, rival in RIVALS.items()}}


def checkout(key: str, path: str) -> str:
    """Returns the absolute path of a rival's checkout; raises UsageError if it is none."""
    rival = RIVALS[key]
    if not (Path(path) / rival.known_file).is_file():
        raise UsageError(
            f"--{key}={path} is no checkout of {rival.repository}: no {rival.known_file}"
        )
    return str(Path(path).resolve())


def python(flag: str, path: str | None) -> str:
    """Returns the Python that runs a rival; `path` is the value of --FLAG, or None for this one."""
    executable = sys.executable if path is None else shutil.which(path)
    if executable is None:
        raise UsageError(f"--{flag}={path} is no program")
    return os.path.abspath(executable)  # rivals run in other folders


def commit(path: str) -> str:
    """Returns the short commit of a checkout, or "unknown" if it is no repository of its own."""
    command = ["git", "-C", path, "rev-parse", "--show-toplevel", "--short", "HEAD"]
    with contextlib.suppress(OSError, ValueError):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        top, short = process.stdout.splitlines()
        if Path(top).samefile(path):
            return short
    return "unknown"


class Child:
    """Process of an adapter, with the protocol of `third_party/child.py`."""

    def __init__(self, command: Sequence[str], spec: Mapping[str, Any], limit: float) -> None:
        """Starts an adapter in an empty folder; an answer may take `limit` seconds."""
        self._limit = limit
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name, "errors.txt")
        workdir = Path(self._folder.name, "inside")
        workdir.mkdir()
        # Without PYTHONPATH: a checkout may have modules with the names of this project's.
        environment = {k: value for k, value in os.environ.items() if k != "PYTHONPATH"}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(spec)],
                cwd=workdir,
                env=environment,
                text=True,
                stderr=errors,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        self.pid = self._process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")  # marks the end

    def wait_until_ready(self) -> dict[str, Any]:
        """Returns the rival's facts once it is ready; raises Gone if it cannot do the work."""
        message = self._read_message()
        if "lacks" in message:
            raise self._gone(str(message["lacks"]))
        if "ready" not in message:
            raise self._gone("it does not speak the protocol")
        return dict(message["ready"])

    def go(self) -> float:
        """Makes the rival do the work once, and returns its seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, which the next message tells
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        try:
            return float(self._read_message()["seconds"])
        except (KeyError, TypeError, ValueError):
            raise self._gone("it does not speak the protocol") from None

    def _read_message(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._limit)
        except queue.Empty:
            raise self._gone(f"no answer in {self._limit:g} s; --limit gives it longer") from None
        if not line:
            status = self._process.wait()
            lines = self._errors.read_text(errors="replace").split("\n")
            last = next((text.strip() for text in reversed(lines) if text.strip()), "no message")
            raise self._gone(f"it ended with status {status}: {last}")
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                return message
        return {}

    def _gone(self, line: str) -> Gone:
        self.close()
        return Gone(" ".join(line.split())[:300])

    def close(self) -> None:
        """Ends the process, even in the middle of its work."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._listener.join(1)  # its children may keep the pipe open
        self._folder.cleanup()
