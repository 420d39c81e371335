"""Tests of the benchmark's facts about the process."""

from pathlib import Path

import numpy as np
import pytest

from experiments.libraries import work


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset a process's peak"
)
def test_a_workload_has_its_own_peak():
    """An array of 300 MB that is freed before does not count, one that is freed later does."""
    before = np.ones(300_000_000, np.uint8)
    assert work.peak_memory() >= before.nbytes
    del before
    work.forget_peak()
    assert work.peak_memory() - work.resident_memory() < 50_000_000
    later = np.ones(200_000_000, np.uint8)
    size = later.nbytes
    del later
    assert work.peak_memory() - work.resident_memory() > size / 2
