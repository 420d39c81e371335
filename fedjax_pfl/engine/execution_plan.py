"""How a run's work is laid out: convolutions' lowering, and how many clients are vmapped together.

Results agree to rounding whatever the plan is; what is usual rests on measurements on CPUs.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax

from fedjax_pfl.engine import multiprocess


class Plan(NamedTuple):
    """See `networks/lowerings` for `conv`; `chunk` clients are vmapped together on a device."""

    conv: str
    chunk: int


def describe(plan: Plan, cohort: int, devices: int) -> str:
    """A line for people."""
    devices = min(devices, cohort)
    where = f"each of {devices} devices" if devices > 1 else "one device"
    who = f"{cohort} client" + "s" * (cohort > 1)
    return (
        f"{who} a round, {min(plan.chunk, -(-cohort // devices))} at a time on {where}, "
        f"convolutions by {plan.conv}"
    )


def agreed(plans: Sequence[Plan] | None) -> list[Plan] | None:
    """What process 0 has read."""
    found = multiprocess.agree(plans)
    return None if found is None else [Plan(*one) for one in found]


def machine() -> str:
    """What a plan is for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{jax.devices()[0].device_kind}, {cores} cores"
