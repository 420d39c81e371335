"""Devices of this machine: one per CPU core, and a cache of compiled programs."""

import os
import warnings
from pathlib import Path

import jax


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare_devices() -> None:
    """Makes every CPU core a JAX device and keeps compiled programs for later runs.

    The simulation spreads clients over devices, so this uses all cores. GPUs and TPUs are devices
    already. Call it before the first JAX operation; afterwards the number of devices is fixed and
    a warning says so.

    A number of devices in XLA_FLAGS is kept. Compiled programs go to JAX_COMPILATION_CACHE_DIR, by
    default `fedjax_pfl` in XDG_CACHE_HOME or ~/.cache.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "fedjax_pfl"))
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", cores())
    except RuntimeError:  # JAX has started
        if jax.default_backend() == "cpu" and jax.local_device_count() < cores():
            warnings.warn(
                f"JAX has already started with {jax.local_device_count()} of {cores()} CPU cores; "
                "call prepare_devices() before the first JAX operation",
                stacklevel=2,
            )
