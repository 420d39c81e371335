"""A run's evaluations as a file that TensorBoard shows: the setting `tensorboard`.

The file is what metrics.jsonl is: written anew from its lines when a run begins or goes on, and
longer by one record after each evaluation. So nothing is there twice, and nothing is missing. A
scalar has its name in metrics.jsonl, as in before/accuracy_mean.
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
    """UsageError where the package that writes these files is not at hand."""
    try:
        import tensorboardX.proto.event_pb2  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"tensorboard needs a package that is not there ({error}); install tensorboardX, or "
            "leave tensorboard off"
        ) from None


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The scores and counts of a line of metrics.jsonl by name; what is not finite is not there."""
    for key, value in line.items():
        if key in _STAGES:
            yield from ((f"{key}/{name}", v) for name, v in (value or {}).items() if v is not None)
        elif (key in _COUNTS or key.startswith("train_")) and value is not None:
            yield key, value


def write(directory: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """The file, with these evaluations in it."""
    path = directory / FILE
    path.parent.mkdir(exist_ok=True)
    part = path.with_name("new.part")  # a name that TensorBoard does not look for
    began = _began(directory)
    head = _record(wall_time=began, file_version="brain.Event:2")
    part.write_bytes(b"".join([head, *(_evaluation(began, line) for line in metrics)]))
    os.replace(part, path)


def append(directory: Path, line: Mapping[str, Any]) -> None:
    """One more evaluation."""
    with open(directory / FILE, "ab") as file:
        file.write(_evaluation(_began(directory), line))


def _began(directory: Path) -> float:
    return (directory / "config.json").stat().st_mtime  # which is written once, at the start


def _evaluation(began: float, line: Mapping[str, Any]) -> bytes:
    """At the time at which the run would have been there without a pause."""
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
    wall_time = began + sum(
        line.get(f"{part}seconds") or 0 for part in ("", "compile_", "checkpoint_")
    )
    return _record(wall_time=wall_time, step=line["round"], summary=Summary(value=values))


def _record(**fields: Any) -> bytes:
    """An event, framed as a TFRecord: its length, that one's checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content = Event(**fields).SerializeToString()
    length = struct.pack("<Q", len(content))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + sums[0] + content + sums[1]
