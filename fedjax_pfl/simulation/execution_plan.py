"""How a run's work is laid out: convolutions' lowering, and how many clients are vmapped together.

Results agree to rounding whatever the plan is; what is usual rests on measurements on CPUs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation import multiprocess
from fedjax_pfl.simulation.devices import cores


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
    return f"{jax.devices()[0].device_kind}, {cores()} cores"


def mesh(devices: int | None, cohort: int, *, several: bool) -> Mesh | None:
    """All devices; on a CPU, unless a number is given, no more than there are clients in a round.

    several: runs are computed by one program, which JAX 0.11 cannot compile for several devices of
      a CPU: XLA ends the process. 0.10 and 0.12 can.

    A core whose device has no client to train would wait; without one it helps with the products of
    the others, which takes .6 of the time where there is one client on two cores.
    """
    chosen = multiprocess.devices(devices)
    if devices is None and multiprocess.count() == 1 and chosen[0].platform == "cpu":
        chosen = chosen[:cohort]
    on_cpus = chosen[0].platform == "cpu" and len(chosen) > 1
    if several and on_cpus and jax.__version_info__[:2] == (0, 11):
        if devices is not None or multiprocess.count() > 1:
            # Several processes have a device each, which no setting makes fewer.
            fewer = "use devices=1, " if multiprocess.count() == 1 else ""
            raise UsageError(
                f"JAX {jax.__version__} cannot compile several runs as one program over "
                f"{len(chosen)} CPU devices; {fewer}run them one by one, or take JAX 0.12"
            )
        chosen = chosen[:1]
    if len(chosen) == 1:
        return None
    axis = (AxisType.Auto,)
    return jax.make_mesh((len(chosen),), ("clients",), axis, devices=chosen)


def at_once(count: int) -> int:
    """On a CPU one client at a time fills a core; an accelerator wants them all together."""
    return 1 if jax.default_backend() == "cpu" else count
