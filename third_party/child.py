"""Protocol of an adapter: a process that does its work once each time it is told to.

The process gets the work as JSON on its command line, prepares it and runs it once to warm up. It
prints one line of JSON, {"ready": {...}}, or {"lacks": REASON} and ends. It answers every line "go"
on its input with {"seconds": ...}, and ends with its input. The module needs only the standard
library, so any Python can run it. All other output of the library goes to stderr.
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

Spec = dict[str, Any]  # description of the work


class Lacks(Exception):
    """Reason why a library cannot do the work, in one line."""


def serve(prepare: Callable[[Spec], tuple[dict[str, Any], Callable[[], float | None]]]) -> None:
    """Runs the protocol until the input ends.

    Args:
      prepare: Takes the work and returns facts about the library and a function that does the work
        once. That function returns its seconds, or None if its whole duration counts.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        facts, work = prepare(json.loads(sys.argv[1]))
    except Lacks as error:
        send({"lacks": str(error)})
        return
    except ImportError as error:
        send({"lacks": f"it cannot be imported by {sys.executable}: {error}"})
        return
    send({"ready": facts})
    for line in sys.stdin:
        if line.strip() != "go":
            break
        start = time.perf_counter()
        measured = work()
        duration = time.perf_counter() - start
        send({"seconds": duration if measured is None else measured})


def checkout(spec: Spec, *modules: str) -> None:
    """Makes modules importable from the checkout; raises Lacks with all that are not installed."""
    sys.path.insert(0, spec["checkout"])
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise Lacks(f"it needs {', '.join(missing)}, which {sys.executable} has not")


def check_methods(spec: Spec, methods: Any) -> None:
    """Raises Lacks for a method that an adapter does not have."""
    for run in spec["runs"]:
        if run["algorithm"] not in methods:
            raise Lacks(f"its adapter does not run {run['algorithm']}")


def versions(*names: str) -> dict[str, str]:
    """Returns the versions of installed packages by name."""
    return {name: metadata.version(name) for name in names}


@contextlib.contextmanager
def counting() -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Counts what PyTorch does in the block.

    Yields two counters: steps by the number of parameters of the optimiser, and training batches by
    their size.
    """
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps: Counter[int] = Counter()
    batches: Counter[int] = Counter()

    def count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        groups = optimizer.param_groups
        steps[sum(p.numel() for group in groups for p in group["params"])] += 1

    def count_batch(module: Any, args: Any) -> None:
        if isinstance(module, torch.nn.CrossEntropyLoss) and torch.is_grad_enabled():
            batches[len(args[1])] += 1

    hooks = [
        register_optimizer_step_post_hook(count_step),
        register_module_forward_pre_hook(count_batch),
    ]
    try:
        yield steps, batches
    finally:
        for hook in hooks:
            hook.remove()


def check_work(spec: Spec, steps: Counter[int], batches: Counter[int]) -> dict[str, Any]:
    """Checks the work of the warm-up against the description.

    Args:
      spec: Description of the work.
      steps: Steps by number of parameters, from `counting`.
      batches: Training batches by size, from `counting`.

    Returns:
      The number of parameters, client steps and the batch size. Raises Lacks for different work.
    """
    size, expected = spec["parameters"], spec["client_steps"]
    if steps[size] != expected or dict(batches) != {spec["batch"]: expected}:
        raise Lacks(
            f"its work is another: steps by parameters {dict(steps)} and batches by size "
            f"{dict(batches)}, where {expected} steps of {spec['batch']} on {size} are asked for"
        )
    return {"parameters": size, "client_steps": expected, "batch": spec["batch"]}
