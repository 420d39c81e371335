"""Event file for TensorBoard with a run's evaluations (setting `tensorboard`).

When a run starts or resumes, the file is rewritten from metrics.jsonl. Each evaluation appends one
record. Scalars are named after keys of metrics.jsonl, such as before/accuracy_mean.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError

FILE = Path("tensorboard") / "events.out.tfevents.run"
_STAGES = ("before", "after", "validation")
_COUNTS = ("bytes_down", "bytes_up", "dropped", "rejected")


def check() -> None:
    """Raises UsageError if tensorboardX is not installed."""
    try:
        import tensorboardX.proto.event_pb2  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"tensorboard needs the package tensorboardX ({error}); install it, or leave "
            "tensorboard off"
        ) from None


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields (name, value), such as before/accuracy_mean, of numbers in a line of metrics.jsonl."""
    for key, value in line.items():
        if key in _STAGES:
            yield from ((f"{key}/{name}", v) for name, v in (value or {}).items() if v is not None)
        elif (key in _COUNTS or key.startswith("train_")) and value is not None:
            yield key, value


def write(directory: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Writes the event file of a run directory anew, with the given lines of metrics.jsonl."""
    path = directory / FILE
    path.parent.mkdir(exist_ok=True)
    part = path.with_name("new.part")  # a name that TensorBoard ignores
    start = _start_time(directory)
    head = _record(wall_time=start, file_version="brain.Event:2")
    part.write_bytes(b"".join([head, *(_evaluation(start, line) for line in metrics)]))
    os.replace(part, path)


def append(directory: Path, line: Mapping[str, Any]) -> None:
    """Appends a line of metrics.jsonl to the event file of a run directory."""
    with open(directory / FILE, "ab") as file:
        file.write(_evaluation(_start_time(directory), line))


def _start_time(directory: Path) -> float:
    return (directory / "config.json").stat().st_mtime  # written once, at the start


def _evaluation(start: float, line: Mapping[str, Any]) -> bytes:
    """Returns a line of metrics.jsonl as an encoded event.

    Its time is `start` (seconds since 1970) plus the recorded seconds, without interruptions.
    """
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
    wall_time = start + sum(
        line.get(f"{part}seconds") or 0 for part in ("", "compile_", "checkpoint_")
    )
    return _record(wall_time=wall_time, step=line["round"], summary=Summary(value=values))


def _record(**fields: Any) -> bytes:
    """Returns an Event of the given fields as a TFRecord: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content = Event(**fields).SerializeToString()
    length = struct.pack("<Q", len(content))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + sums[0] + content + sums[1]
