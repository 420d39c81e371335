"""The rivals' side of the benchmark: a process that does its work once each time it is told to.

It is started with the work as JSON, prepares it, warms up, and says one line of JSON on stdout:
{"ready": {...}}, or {"lacks": "..."} and ends. For every line "go" it does the work and answers
{"seconds": ...}; at the end of its input it ends. Only the standard library is needed, so that any
Python can run it; whatever the rival prints goes to stderr.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

Spec = dict[str, Any]


class Lacks(Exception):
    """What keeps a rival from doing this work, in one line."""


def serve(prepare: Callable[[Spec], tuple[dict[str, Any], Callable[[], float | None]]]) -> None:
    """Speak the protocol.

    Args:
      prepare: from the work to what is known of it and a function that does it once; what that
        returns are its seconds, or None where all of it counts.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        about, work = prepare(json.loads(sys.argv[1]))
    except Lacks as error:
        say({"lacks": str(error)})
        return
    except ImportError as error:
        say({"lacks": f"it cannot be imported by {sys.executable}: {error}"})
        return
    say({"ready": about})
    for line in sys.stdin:
        if line.strip() != "go":
            break
        began = time.perf_counter()
        counted = work()
        taken = time.perf_counter() - began
        say({"seconds": taken if counted is None else counted})


def checkout(spec: Spec, *modules: str) -> None:
    """Look for modules in the checkout first; name all that are not installed at once."""
    sys.path.insert(0, spec["checkout"])
    lacking = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            lacking.append(name)
    if lacking:
        raise Lacks(f"it needs {', '.join(lacking)}, which {sys.executable} has not")


def versions(*names: str) -> dict[str, str]:
    """Of installed packages."""
    return {name: metadata.version(name) for name in names}


@contextlib.contextmanager
def counting() -> Iterator[tuple[Counter[int], Counter[int]]]:
    """PyTorch's steps by the numbers that the optimiser has, and training batches by their size."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps: Counter[int] = Counter()
    batches: Counter[int] = Counter()

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        groups = optimizer.param_groups
        steps[sum(p.numel() for group in groups for p in group["params"])] += 1

    def called(module: Any, args: Any) -> None:
        if isinstance(module, torch.nn.CrossEntropyLoss) and torch.is_grad_enabled():
            batches[len(args[1])] += 1

    hooks = [register_optimizer_step_post_hook(stepped), register_module_forward_pre_hook(called)]
    try:
        yield steps, batches
    finally:
        for hook in hooks:
            hook.remove()


def same(spec: Spec, steps: Counter[int], batches: Counter[int]) -> dict[str, Any]:
    """What the warm-up did, if it is the work that was asked for."""
    size, wanted = spec["parameters"], spec["client_steps"]
    if steps[size] != wanted or dict(batches) != {spec["batch"]: wanted}:
        raise Lacks(
            f"its work is another: steps by parameters {dict(steps)} and batches by size "
            f"{dict(batches)}, where {wanted} steps of {spec['batch']} on {size} are asked for"
        )
    return {"parameters": size, "client_steps": wanted, "batch": spec["batch"]}
