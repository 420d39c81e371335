"""Measurements that need a GPU, most important first, each in its own process.

An item that hangs or crashes costs only its own time limit. Each item writes its results at once.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.flag_checks import refuse_unread
from experiments.libraries import rivals
from fedjax_pfl.core.errors import UsageError


class Item(NamedTuple):
    """A command line and the seconds that it may take."""

    arguments: tuple[str, ...]
    limit: float


def _work(name: str, limit: float, *flags: str) -> Item:
    return Item(("-m", "experiments.benchmark", f"--work={name}", "--repeats=5", *flags), limit)


_PYTEST = ("-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider")
ITEMS = {
    "fused": Item((*_PYTEST, "tests/networks/fused_test.py"), 60),
    "profile-lenet-100": _work("profile-lenet-100", 60),
    "lenet-100": _work("lenet-100", 60, "--notorch"),
    "layouts-lenet": _work("layouts-lenet", 150),
    "seeds-8": _work("seeds-8", 60, "--notorch"),
    "pfedla-1000": _work("pfedla-1000", 90, "--notorch", "--repeats=3"),
    "layouts-resnet9": _work("layouts-resnet9", 150),
    "profile-resnet9": _work("profile-resnet9", 60),
    "layouts-mlp": _work("layouts-mlp", 60),
    "profile-mlp": _work("profile-mlp", 40),
    "lenet-10": _work("lenet-10", 60),
    "resnet9": _work("resnet9", 60),
    "mlp": _work("mlp", 40),
    "contract": Item((*_PYTEST, "-n", "8", "-m", "not slow", "tests/contract_test.py"), 240),
}


_PICTURED = "lenet-"  # prefix of the workloads in the picture


def refuse_flags(flag_values: Any) -> None:
    """Raises UsageError for a flag without effect. The items of --device have their own values."""
    if flag_values.device is None:
        refuse_unread(flag_values, ["seconds"], "without --device")
        names = flag_values["work"].value or [_PICTURED]  # all workloads by default
        if not flag_values["add"].value and not any(name.startswith(_PICTURED) for name in names):
            refuse_unread(flag_values, ["picture"], "without a workload lenet-… in --work")
        return
    names = ["work", "repeats", "limit", "torch", "add", "picture", "note"]
    names += [key + end for key in rivals.RIVALS for end in ("", "_python")]
    refuse_unread(flag_values, names, "with --device")


def run_all(out: str | None, seconds: float) -> None:
    """Runs the items in turn until the time is over, and prints one line for each."""
    if not out:
        raise UsageError("--device needs --out=FILE.json, where each item adds its results")
    ended = time.monotonic() + seconds
    for name, item in ITEMS.items():
        print(f"{name}: {_run(item, out, ended - time.monotonic())}", flush=True)


def _run(item: Item, out: str, left: float) -> str:
    """Runs one item and returns how it ended, in words."""
    if left < 5:
        return "not started, the time is over"
    arguments: Sequence[str] = item.arguments
    if "experiments.benchmark" in arguments:
        arguments = (*arguments, f"--out={out}", "--add")
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, *arguments],
            timeout=min(item.limit, left),
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {time.monotonic() - began:.0f} s"
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    last = "" if not ended.returncode or not lines else f": {lines[-1][:200]}"
    return f"status {ended.returncode} in {time.monotonic() - began:.0f} s{last}"
