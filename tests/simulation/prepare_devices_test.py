"""Preparing the devices of this machine."""

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
