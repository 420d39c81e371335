"""How a run's work is laid out: convolutions' lowering, and how many clients are vmapped together.

Results agree to rounding whatever the plan is. The usual one rests on measurements on CPUs; with
`measure` the machine that a run is on is asked, once for each kind of work, and the answer kept.
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine import multiprocess

LOWERINGS = ("auto", "patches", "rows", "blocks", "winograd", "xla")
STEPS = 4  # of local training, when a plan is tried
_WORTH = 0.95  # of the usual plan's time: what another has to be below
_REPEATS = 3


class Plan(NamedTuple):
    """See `models/conv.py` for `conv`; `chunk` clients are vmapped together on a device."""

    conv: str
    chunk: int
    measured: bool = False


def describe(plan: Plan, cohort: int, devices: int) -> str:
    """A line for people."""
    devices = min(devices, cohort)
    where = f"each of {devices} devices" if devices > 1 else "one device"
    who = f"{cohort} client" + "s" * (cohort > 1)
    why = "measured here" if plan.measured else "as usual; the setting measure tries others"
    return (
        f"{who} a round, {min(plan.chunk, -(-cohort // devices))} at a time on {where}, "
        f"convolutions by {plan.conv} ({why})"
    )


def chunks(most: int) -> list[int]:
    """Powers of four, and all."""
    powers = itertools.takewhile(lambda n: n < most, (4**i for i in itertools.count()))
    return [*powers, most]


def fastest(
    usual: Plan,
    chunks: Sequence[int],
    lowerings: Sequence[str],
    seconds: Callable[[Plan], float | None],
) -> Plan:
    """The best of the chunks with the usual lowering, and then of the lowerings with that chunk.

    Args:
      seconds: what a plan takes; None where it cannot be.
    """
    if not set(chunks) - {usual.chunk} and not set(lowerings) - {usual.conv}:
        return usual
    best, time_of = usual, seconds(usual)
    limit = None if time_of is None else _WORTH * time_of
    for change in (
        lambda best: [best._replace(chunk=chunk) for chunk in chunks],
        lambda best: [best._replace(conv=conv) for conv in lowerings],
    ):
        for tried in change(best):
            if tried[:2] in (usual[:2], best[:2]):
                continue
            taken = seconds(tried)
            if taken is not None and (limit is None or taken < limit):
                best, limit = tried, taken
    return best if limit is None else best._replace(measured=True)


def timed(rounds: Any, points: Any, data: Any) -> float | None:
    """Seconds of a round, the least of some; None where there is no room or no such lowering."""
    try:
        key, arrays = rounds.place((points, data))
        zero, one = (rounds.place(jnp.int32(number)) for number in (0, 1))
        state, taken = rounds.init(key), []
        for _ in range(1 + _REPEATS):
            began = time.perf_counter()
            state, _ = rounds.run(key, state, arrays, zero, one)
            jax.block_until_ready(state)
            taken.append(time.perf_counter() - began)
    except UsageError:
        return None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise
    return min(taken[1:])


def agreed(plans: Sequence[Plan] | None) -> list[Plan] | None:
    """What process 0 has read."""
    found = multiprocess.agree(plans)
    return None if found is None else [Plan(*one) for one in found]


def machine() -> str:
    """What a plan is for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{jax.devices()[0].device_kind}, {cores} cores"


def work(described: Mapping[str, Any]) -> str:
    """A name for a kind of work on this machine, under which a measurement is kept."""
    return json.dumps({"machine": machine(), "jax": jax.__version__, **described}, sort_keys=True)


def kept(folder: Path, name: str) -> Plan | None:
    """What was measured for a kind of work, if it was."""
    return _all(folder).get(name)


def keep(folder: Path, name: str, plan: Plan) -> None:
    """Write it down for later runs; where that cannot be, they measure again."""
    part = folder / f"plans.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({**_all(folder), name: plan}, indent=1) + "\n")
        os.replace(part, folder / "plans.json")
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()


def _all(folder: Path) -> dict[str, Plan]:
    try:
        found = json.loads((folder / "plans.json").read_text())
        return {key: Plan(str(conv), int(chunk), True) for key, (conv, chunk, _) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def folder() -> Path:
    """Beside the compiled programs that are kept."""
    given = jax.config.values["jax_compilation_cache_dir"]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedjax_pfl"
    return Path(given) if given else cache
