"""Tests of loggers: independent readers read their files."""

import functools
import importlib.util
import json
import os
import socket
import struct
import sys
import time

import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import loggers, run_reader
from fedjax_pfl.runs import runner
from tests.runs.common import BASE, FILES, read_metrics

STAGES = ("before", "after", "validation")
COUNTS = ("train_loss", "bytes_down", "bytes_up", "dropped", "rejected")
NAMES = [
    pytest.param(
        name,
        marks=[
            pytest.mark.slow("whole runs"),
            # mlflow uses a loader that SQLAlchemy deprecates.
            pytest.mark.filterwarnings("ignore:The ``noload``"),
            pytest.mark.skipif(
                any(importlib.util.find_spec(p.partition(".")[0]) is None for p in packages),
                reason=f"{name} is not installed; .ci/run runs pip install -e '.[{name}]'",
            ),
        ],
    )
    for name, packages in loggers._PACKAGES.items()
]


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


def read_tensorboard(directory):
    """Returns settings, and scalars by round, of the only event file; checks its checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

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
    first, start, _, *evaluations = records
    assert first.file_version == "brain.Event:2"
    assert sorted(e.wall_time for e in evaluations) == [e.wall_time for e in evaluations]
    plugin = HParamsPluginData.FromString(start.summary.value[0].metadata.plugin_data.content)
    settings = {
        key: getattr(value, value.WhichOneof("kind"))
        for key, value in plugin.session_start_info.hparams.items()
    }
    return settings, [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in evaluations
    ]


def read_wandb(directory):
    """Returns settings, and scalars by round, of the only offline run."""
    (path,) = (directory / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    # A process of its own writes the file. It writes the last records after `finish` has returned.
    while not (records := wandb_records(path.read_bytes())) or not records[-1].HasField("exit"):
        assert time.monotonic() < deadline, [r.WhichOneof("record_type") for r in records]
        time.sleep(0.05)
    settings, evaluations = {}, []
    for record in records:
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if items:
            step = record.history.step.num
            evaluations.append((step, {k: v for k, v in items.items() if k[0] != "_"}))
        for item in record.run.config.update:
            settings[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return {k: v for k, v in settings.items() if k != "_wandb"}, evaluations


def wandb_records(data):
    """Returns the whole records of a log of LevelDB, which may still be written.

    Its blocks of 32 KiB hold records of checksum, length, kind and content.
    """
    from wandb.proto import wandb_internal_pb2

    records, position, content = [], 7, b""
    while position + 7 <= len(data):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if position + 7 + length > len(data):
            break
        content += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind not in (2, 3):  # these are continued in the next block
            records.append(wandb_internal_pb2.Record.FromString(content))
            content = b""
    return records


def read_mlflow(directory):
    """Returns settings as text, and scalars by round, of the only run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("fedjax_pfl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", directory.name)
    by_round = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert name not in by_round.setdefault(metric.step, {})
            by_round[metric.step][name] = metric.value
    return run.data.params, sorted(by_round.items())


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def assert_as_in_metrics(name, directory, lines):
    settings, evaluations = READERS[name](directory)
    assert [step for step, _ in evaluations] == [line["round"] for line in lines]
    for (_, values), line in zip(evaluations, lines, strict=True):
        expected = {f"{stage}/{k}": v for stage in STAGES for k, v in (line[stage] or {}).items()}
        expected |= {key: line[key] for key in COUNTS}
        assert {k: np.float32(v) for k, v in values.items()} == {
            k: np.float32(v) for k, v in expected.items()
        }
    assert {"mlp.hidden", "learning_rate", "algorithm"} <= set(settings)
    assert float(settings["learning_rate"]) == BASE["learning_rate"]
    assert (settings["algorithm"], settings["mlp.hidden"]) == ("fedavg", "[4]")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)


class Stop(BaseException):
    """Replaces Ctrl-C, which would stop pytest."""


@pytest.mark.parametrize("name", NAMES)
def test_a_log_equals_metrics_after_an_interruption_and_sends_nothing(name, tmp_path, monkeypatch):
    directory, config = tmp_path / "run A", {**BASE, "log_to": name}

    def connect(self, address, connect=socket.socket.connect):
        assert self.family == socket.AF_UNIX or address[0] == "127.0.0.1", address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    log = loggers.Logger.__call__

    def stopped(self, line):
        log(self, line)
        if line["round"] == 4:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(loggers.Logger, "__call__", stopped)
        with pytest.raises(Stop):
            runner.run(config, directory)
    if name == "tensorboard":  # as if it was killed while it wrote
        path = directory / loggers.EVENT_FILE
        path.write_bytes(path.read_bytes()[:-9])
    result = runner.run(config, directory)
    assert_as_in_metrics(name, directory, result.metrics)
    assert result.metrics == read_metrics(directory)
    runner.run(BASE, directory)
    assert_as_in_metrics(name, directory, result.metrics)  # a logger that is off removes nothing
    assert {path.name for path in directory.iterdir()} == {*FILES, name}

    finished, added = tmp_path / "finished", tmp_path / "callback"
    runner.run(BASE, finished)
    assert runner.run({**BASE, "log_to": name}, finished).resumed_at == 6
    assert_as_in_metrics(name, finished, result.metrics)
    logger = getattr(pfl.loggers, name)(added)
    result = runner.run(BASE, added, on_evaluation=logger)
    logger.close()
    assert_as_in_metrics(name, added, result.metrics)


def test_a_log_needs_no_file_that_the_end_of_a_run_writes(tmp_path):
    """A repeated command copies the evaluations before it writes a damaged clients.csv again."""
    line = {"round": 1, "before": {"accuracy_mean": 0.5}}
    contents = {"config.json": {"rounds": 1}, "metrics.jsonl": line, "clients.csv": "damaged"}
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    (tmp_path / "report.html").touch()
    with pytest.raises(UsageError, match="it is no table of clients"):
        run_reader.read(tmp_path)
    logger = loggers.tensorboard(tmp_path)
    logger(line)
    logger.close()
    assert (tmp_path / loggers.EVENT_FILE).stat().st_size


def test_scalars_and_parameters_skip_missing_values():
    line = {"round": 3, "seconds": 1.0, "phase": 0, "bytes_up": 7, "best_round": 2, "epsilon": 2.5}
    line |= {"before": {"loss": None, "accuracy_mean": 0.5}, "after": None, "train_loss": None}
    line |= {"diagnostics": {"one_hot": 1.0, "peers": {"fc1": 2}}, "inactive": ["one_hot"]}
    line |= {"custom_metrics": {"mine": {"unit": "%", "higher_is_better": True}}}
    assert dict(loggers.scalars(line)) == {
        "bytes_up": 7,
        "epsilon": 2.5,
        "before/accuracy_mean": 0.5,
        "diagnostics/one_hot": 1.0,
        "diagnostics/peers/fc1": 2,
    }
    config = {"a": None, "b": {"c": (1, 2), "d": True}, "e": 0.5}
    assert loggers.parameters(config) == {"b.c": "[1, 2]", "b.d": True, "e": 0.5}


def test_what_cannot_be_logged_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    run = functools.partial(runner.run, workdir=tmp_path / "new")
    with pytest.raises(UsageError, match=r"^log_to has no 'tensorbord'; did you mean tensorboard"):
        run({**BASE, "log_to": "tensorbord"})
    with pytest.raises(UsageError, match=r"^log_to is for a run with a workdir"):
        runner.run({**BASE, "log_to": "tensorboard"})
    for name, packages in loggers._PACKAGES.items():
        package = packages[0].partition(".")[0]
        for module in [n for n in sys.modules if n.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        line = rf"^{name} is not .*install '\.\[{name}\]' in the clone$"
        with pytest.raises(UsageError, match=line):
            run({**BASE, "log_to": name})
    assert list(tmp_path.iterdir()) == []
