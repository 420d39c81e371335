"""Preparing the devices of this machine."""

import platform
import subprocess
import sys

import jax
import pytest

from fedjax_pfl.simulation import devices


@pytest.fixture
def cache_setting(monkeypatch, tmp_path):
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


def test_the_compilation_cache_is_set_only_once(cache_setting, monkeypatch, tmp_path):
    for home in (tmp_path, "/elsewhere"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        devices.prepare_devices()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "fedjax_pfl")


def test_a_late_call_warns_only_if_cores_are_unused(monkeypatch):
    count = jax.local_device_count()
    monkeypatch.setattr(devices, "cores", lambda: count)
    devices.prepare_devices()  # warnings are errors
    monkeypatch.setattr(devices, "cores", lambda: count + 1)
    line = rf"JAX has already started with {count} of {count + 1} CPU cores; call prepare_devices"
    with pytest.warns(UserWarning, match=line):
        devices.prepare_devices()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    devices.prepare_devices()


def test_cores_are_limited_by_the_affinity_of_the_process(monkeypatch):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert devices.cores() == 3
    monkeypatch.delattr(devices.os, "sched_getaffinity")
    monkeypatch.setattr(devices.os, "cpu_count", lambda: None)
    assert devices.cores() == 1


_COUNT_PAGE_FAULTS = """
import resource
from concurrent.futures import ThreadPoolExecutor
from fedjax_pfl import prepare_devices

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"1") * 2**27  # 32,768 pages of 4 KiB; NumPy would ask for larger pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

prepare_devices()
with ThreadPoolExecutor(1) as thread:  # XLA allocates in threads of its own
    print(*[thread.submit(page_faults).result() for _ in range(2)])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_freed_memory_is_reused_without_page_faults():
    """Runs a new process, because threads keep the heaps that they already have."""
    ran = subprocess.run(
        [sys.executable, "-c", _COUNT_PAGE_FAULTS], capture_output=True, text=True, check=True
    )
    first, second = map(int, ran.stdout.split())
    assert second < 1000 < first
