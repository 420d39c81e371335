"""Event files, read back by a reader that shares nothing with what wrote them but the schema."""

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
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(content):
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_the_checksum_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283


def events(directory):
    """The events of the only file there, whose checksums hold."""
    (path,) = (directory / "tensorboard").iterdir()
    assert "tfevents" in path.name  # what TensorBoard looks for
    rest, found = path.read_bytes(), []
    while rest:
        length = int.from_bytes(rest[:8], "little")
        content = rest[12 : 12 + length]
        sums = struct.unpack("<II", rest[8:12] + rest[12 + length : 16 + length])
        assert sums == (masked(rest[:8]), masked(content))
        found.append(Event.FromString(content))
        rest = rest[16 + length :]
    return found


def assert_as_in_metrics(directory, lines):
    first, *each = events(directory)
    assert first.file_version == "brain.Event:2"
    assert [event.step for event in each] == [line["round"] for line in lines]
    assert sorted(e.wall_time for e in each) == [e.wall_time for e in each]
    for event, line in zip(each, lines, strict=True):
        got = {value.tag: value.simple_value for value in event.summary.value}
        assert len(got) == len(event.summary.value)
        wanted = {f"{stage}/{k}": v for stage in STAGES for k, v in (line[stage] or {}).items()}
        wanted |= {k: line[k] for k in ("train_loss", "bytes_down", "bytes_up")}
        wanted |= {k: line[k] for k in ("dropped", "rejected")}
        assert got == {tag: float(np.float32(value)) for tag, value in wanted.items()}


class Stop(BaseException):
    """Stands for Ctrl-C, which pytest would take for its own."""


@pytest.mark.parametrize(("at", "torn"), [(None, False), (2, False), (3, True)])
def test_the_file_says_what_metrics_say(at, torn, tmp_path, monkeypatch):
    """Of a run, of one that is stopped before a line is written, and while it is."""
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


def test_a_finished_run_gets_its_file_and_loses_nothing_without_the_setting(tmp_path):
    runner.run(BASE, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == FILES
    result = runner.run(LOGGED, tmp_path)
    assert result.resumed_at == 6
    assert_as_in_metrics(tmp_path, result.metrics)
    runner.run(BASE, tmp_path)
    assert_as_in_metrics(tmp_path, result.metrics)


def test_what_is_not_finite_is_left_out():
    line = {
        "round": 3,
        "seconds": 1.0,
        "phase": 0,
        "before": {"loss": None, "accuracy_mean": 0.5},
        "after": None,
        "train_loss": None,
        "bytes_up": 7,
        "best_round": 2,
    }
    assert dict(tensorboard.scalars(line)) == {"before/accuracy_mean": 0.5, "bytes_up": 7}


def test_without_the_package_a_line_says_so_before_anything_is_written(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        UsageError, match=r"^tensorboard needs the package tensorboardX .*install it"
    ):
        runner.run({**LOGGED, "seed": 9}, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    assert runner.run(BASE).directory is None  # others do not need it
