"""Execution plan: lowering of convolutions, and number of clients that are vmapped together.

Results of all plans agree up to rounding. The defaults were measured on CPUs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation import multiprocess
from fedjax_pfl.simulation.devices import cores


class Plan(NamedTuple):
    """Choices for the training of a phase that affect speed only."""

    conv: str  # lowering of convolutions, see `networks/lowerings`; "auto": chosen per layer
    chunk: int  # clients that are vmapped together on a device


def describe(plan: Plan, cohort: int, devices: int) -> str:
    """Returns a line that describes the plan, for rounds of `cohort` clients on these devices."""
    devices = min(devices, cohort)
    place = f"each of {devices} devices" if devices > 1 else "one device"
    clients = f"{cohort} client" + "s" * (cohort > 1)
    lowering = "chosen per layer" if plan.conv == "auto" else f"by {plan.conv}"
    return (
        f"{clients} a round, {min(plan.chunk, -(-cohort // devices))} at a time on {place}, "
        f"convolutions {lowering}"
    )


def agreed(plans: Sequence[Plan] | None) -> list[Plan] | None:
    """Returns the plans of process 0 in all processes; None if process 0 passes None."""
    first = multiprocess.agree(plans)
    return None if first is None else [Plan(*plan) for plan in first]


def machine() -> str:
    """Returns the device kind and the number of CPU cores, for which a stored plan is valid."""
    return f"{jax.devices()[0].device_kind}, {cores()} cores"


def mesh(devices: int | None, cohort: int, *, several: bool) -> Mesh | None:
    """Returns a mesh of devices with the axis "clients", or None for a single device.

    A CPU core without a device helps with the matrix products of the others: one client on two
    cores takes 0.6 of the time that it takes with two devices. Raises UsageError if this version of
    JAX cannot compile a sweep for several CPU devices.

    Args:
      devices: Number of devices. Default: all; on a CPU at most one per client of a round.
      cohort: Clients of a round.
      several: Whether one program computes several runs. JAX 0.11 cannot compile such a program for
        several CPU devices (XLA ends the process); 0.10 and 0.12 can.
    """
    used = multiprocess.devices(devices)
    if devices is None and multiprocess.count() == 1 and used[0].platform == "cpu":
        used = used[:cohort]
    on_cpus = used[0].platform == "cpu" and len(used) > 1
    if several and on_cpus and jax.__version_info__[:2] == (0, 11):
        if devices is not None or multiprocess.count() > 1:
            # Several processes have one device each for any setting.
            remedy = "use devices=1, " if multiprocess.count() == 1 else ""
            raise UsageError(
                f"JAX {jax.__version__} cannot compile several runs as one program over "
                f"{len(used)} CPU devices; {remedy}run them one by one, or take JAX 0.12"
            )
        used = used[:1]
    if len(used) == 1:
        return None
    axis = (AxisType.Auto,)
    return jax.make_mesh((len(used),), ("clients",), axis, devices=used)


def default_chunk(count: int) -> int:
    """Returns the default of `Plan.chunk` for `count` clients: 1 on a CPU, else `count`."""
    return 1 if jax.default_backend() == "cpu" else count
