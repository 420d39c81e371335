"""Other implementations, each in a process of its own that takes turns with ours."""

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
    """A rival that cannot do the work, died or hangs, in one line."""


class Rival(NamedTuple):
    """An adapter, and what it adapts."""

    name: str
    script: str
    repository: str
    has: str  # a file that a checkout has
    items: tuple[str, ...]


_FEDAVG = ("lenet-10", "lenet-100", "lenet-1000", "mlp")
TORCH = Rival("PyTorch loop", "torch_loop.py", "", "", (*_FEDAVG, "resnet9", "simulation"))
RIVALS = {
    "pfedhn": Rival(
        "the authors' pFedHN",
        "rival_pfedhn.py",
        "AvivSham/pFedHN",
        "experiments/pfedhn/trainer.py",
        ("pfedhn",),
    ),
    "fl_bench": Rival(
        "FL-bench",
        "rival_fl_bench.py",
        "KarhouTam/FL-bench",
        "src/server/pfedla.py",
        (*_FEDAVG, "pfedla", "simulation"),
    ),
    "pfllib": Rival(
        "PFLlib",
        "rival_pfllib.py",
        "TsingZ0/PFLlib",
        "system/flcore/servers/serveravg.py",
        _FEDAVG,
    ),
    "fedjax": Rival(
        "FedJAX",
        "rival_fedjax.py",
        "google/fedjax",
        "fedjax/algorithms/fed_avg.py",
        _FEDAVG,
    ),
}
NAMES = {"torch": TORCH.name, **{key: rival.name for key, rival in RIVALS.items()}}


def checked(key: str, path: str) -> str:
    """A checkout's absolute path, or UsageError."""
    rival = RIVALS[key]
    if not (Path(path) / rival.has).is_file():
        raise UsageError(f"--{key}={path} is no checkout of {rival.repository}: no {rival.has}")
    return str(Path(path).resolve())


def python(flag: str, path: str | None) -> str:
    """The Python that runs a rival: this one where none is path."""
    executable = sys.executable if path is None else shutil.which(path)
    if executable is None:
        raise UsageError(f"--{flag}={path} is no program")
    return executable


def commit(path: str) -> str:
    """Returns the short commit of a checkout, or "unknown"."""
    command = ["git", "-C", path, "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode == 0:
            return process.stdout.strip()
    return "unknown"


class Child:
    """A process that speaks the protocol of `third_party/child.py`."""

    def __init__(self, command: Sequence[str], spec: Mapping[str, Any], limit: float) -> None:
        """Start it in an empty folder of its own; `limit` is how many seconds an answer may take.

        It does not see this project's modules: a checkout may have some of the same name.
        """
        self._limit = limit
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name, "errors.txt")
        inside = Path(self._folder.name, "inside")
        inside.mkdir()
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(spec)],
                cwd=inside,
                env=kept,
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
        with self._process.stdout as lines:  # closed by who reads: nobody closes it under its hands
            for line in lines:
                self._lines.put(line)
        self._lines.put("")  # it has ended

    def ready(self) -> dict[str, Any]:
        """Returns the rival's facts once it is ready; raises Gone if it cannot do the work."""
        answer = self._answer()
        if "lacks" in answer:
            raise self._gone(str(answer["lacks"]))
        if "ready" not in answer:
            raise self._gone("it does not speak the protocol")
        return dict(answer["ready"])

    def go(self) -> float:
        """Let it do the work once; its seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died, which its answer says
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        try:
            return float(self._answer()["seconds"])
        except (KeyError, TypeError, ValueError):
            raise self._gone("it does not speak the protocol") from None

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._limit)
        except queue.Empty:
            raise self._gone(f"no answer in {self._limit:g} s; --limit gives it longer") from None
        if not line:
            status = self._process.wait()
            lines = self._errors.read_text(errors="replace").split("\n")
            last = next((text.strip() for text in reversed(lines) if text.strip()), "no message")
            raise self._gone(f"it ended with status {status}: {last}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        return answer if isinstance(answer, dict) else {}

    def _gone(self, line: str) -> Gone:
        self.close()
        return Gone(" ".join(line.split())[:300])

    def close(self) -> None:
        """End it, also in the middle of its work."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._listener.join(1)  # its own children may hold the pipe for longer
        self._folder.cleanup()
