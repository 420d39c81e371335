"""Devices of this machine: one per CPU core, a cache of compiled programs, and reuse of memory."""

import ctypes
import os
import warnings
from pathlib import Path

import jax

# Options of glibc's `mallopt`. M_MMAP_MAX: no block of memory gets its own mapping.
# M_TRIM_THRESHOLD: freed memory stays with the process. M_ARENA_MAX: all threads share one heap,
# because other heaps hold no large blocks.
_MALLOC_OPTIONS = {-4: 0, -1: 2**31 - 1, -8: 1}


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
    default `fedjax_pfl` in XDG_CACHE_HOME or ~/.cache. With glibc, the process keeps freed memory.
    """
    _keep_freed_memory()
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


def _keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system; else does nothing.

    Every call of a compiled program allocates its buffers. In new memory, the first write to each
    page is a page fault, and these take up to a fifth of a round.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for option, value in _MALLOC_OPTIONS.items():
        mallopt(option, value)
