"""Tests of event files, read back by an independent reader."""

import struct
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import tensorboard
from fedjax_pfl.runs import runner
from tests.runs.common import BASE, FILES, assert_same_run, read_metrics, undisturbed

pytestmark = pytest.mark.slow("whole runs")

LOGGED = {**BASE, "tensorboard": True}
STAGES = ("before", "after", "validation")


def crc32c(content):
    """Returns the CRC-32C checksum, computed bit by bit."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(content):
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_crc32c():
    assert crc32c(b"123456789") == 0xE3069283


def events(directory):
    """Returns the events of the only file, after checking their checksums."""
    (path,) = (directory / "tensorboard").iterdir()
    assert "tfevents" in path.name  # TensorBoard searches for this name
    data, records = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        content = data[12 : 12 + length]
        sums = struct.unpack("<II", data[8:12] + data[12 + length : 16 + length])
        assert sums == (masked(data[:8]), masked(content))
        records.append(Event.FromString(content))
        data = data[16 + length :]
    return records


def assert_as_in_metrics(directory, lines):
    first, *evaluations = events(directory)
    assert first.file_version == "brain.Event:2"
    assert [event.step for event in evaluations] == [line["round"] for line in lines]
    assert sorted(e.wall_time for e in evaluations) == [e.wall_time for e in evaluations]
    for event, line in zip(evaluations, lines, strict=True):
        scalars = {value.tag: value.simple_value for value in event.summary.value}
        assert len(scalars) == len(event.summary.value)
        expected = {f"{stage}/{k}": v for stage in STAGES for k, v in (line[stage] or {}).items()}
        counts = ("train_loss", "bytes_down", "bytes_up", "dropped", "rejected")
        expected |= {k: line[k] for k in counts}
        assert scalars == {tag: float(np.float32(value)) for tag, value in expected.items()}


class Stop(BaseException):
    """Replaces Ctrl-C, which would stop pytest."""


@pytest.mark.parametrize(("at", "torn"), [(None, False), (2, False), (3, True)])
def test_file_equals_metrics_after_an_interruption(at, torn, tmp_path, monkeypatch):
    """Checks a run that is not stopped, one stopped before a record, and one stopped within it."""
    append, calls = tensorboard.append, []

    def stopped(directory, line):
        calls.append(line)
        if len(calls) == at:
            if torn:
                append(directory, line)
                path = directory / tensorboard.FILE
                path.write_bytes(path.read_bytes()[:-9])
            raise Stop
        append(directory, line)

    if at is not None:
        with monkeypatch.context() as patch:
            patch.setattr(tensorboard, "append", stopped)
            with pytest.raises(Stop):
                runner.run(LOGGED, tmp_path)
    result = runner.run(LOGGED, tmp_path)
    assert len(result.metrics) == 3
    assert_as_in_metrics(tmp_path, result.metrics)
    assert result.metrics == read_metrics(tmp_path)
    (tmp_path / tensorboard.FILE).unlink()
    (tmp_path / "tensorboard").rmdir()
    assert_same_run(result, undisturbed(BASE), tmp_path)


def test_finished_run_gets_its_file_and_keeps_it(tmp_path):
    runner.run(BASE, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == FILES
    result = runner.run(LOGGED, tmp_path)
    assert result.resumed_at == 6
    assert_as_in_metrics(tmp_path, result.metrics)
    runner.run(BASE, tmp_path)
    assert_as_in_metrics(tmp_path, result.metrics)


def test_scalars_skip_missing_values():
    line = {"round": 3, "seconds": 1.0, "phase": 0, "bytes_up": 7, "best_round": 2}
    line |= {"before": {"loss": None, "accuracy_mean": 0.5}, "after": None, "train_loss": None}
    assert dict(tensorboard.scalars(line)) == {"before/accuracy_mean": 0.5, "bytes_up": 7}


def test_missing_package_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UsageError, match=r"^tensorboard needs the package .*install it"):
        runner.run({**LOGGED, "seed": 9}, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    assert runner.run(BASE).directory is None
