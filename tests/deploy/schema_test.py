"""Specifications of messages and files: invalid values are refused without quoting them."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import lines, node_file, schema, storage, wire
from fedjax_pfl.deploy.schema import InvalidError
from tests.deploy.loopback import RUN

PLANTED = "Person0"
DIGEST = "0" * 64
SPLITS = {"train": 30, "validation": 0, "test": 10}
DESCRIPTION: dict[str, Any] = {
    "counts": dict(SPLITS),
    "widths": {"train": 30, "validation": 1, "test": 10},
    "input_shape": [3],
    "input_dtype": "float32",
    "stored_dtype": "float32",
    "outputs": 2,
    "each": [],
    "target": ["int32", []],
    "constants": {},
    "classes": ["no", "yes"],
    "input": DIGEST,
    "sums": {"n": 30, "mean": [1.5, 0], "m2": [2.5, 0]},
    "normalise": {"features": [True, True, False], "targets": False},
}
FEDERATION: dict[str, Any] = {
    "counts": [dict(SPLITS)] * 2,
    "held_out": 0,
    "groups": 1,
    "alike": {
        k: DESCRIPTION[k]
        for k in ("input_shape", "input_dtype", "outputs", "each", "target", "constants")
    },
    "widths": DESCRIPTION["widths"],
    "stored_dtype": "float32",
    "mean": [1.5, 0],
    "deviation": [2.5, 1],
}
TRAIN: dict[str, Any] = {
    "kind": "train",
    "run": RUN,
    "client": 1,
    "round": 3,
    "settled": -1,
    "settings": {"mlp": {"hidden": [4]}, "learning_rate": 0.1, "groups": [{"model": "mlp"}]},
    "federation": FEDERATION,
}


def replace_at(content: Any, path: str, value: Any) -> Any:
    """Returns the content with another value at a path such as counts.train, or without it."""
    changed = copy.deepcopy(content)
    *outer, last = path.split(".")
    place = changed
    for name in outer:
        place = place[int(name) if isinstance(place, list) else name]
    if value is DELETE:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return changed


DELETE = object()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("counts.train", "many"),
        ("counts.train", -5),
        ("counts.train", 0),
        ("counts.train", True),
        ("counts.train", 30.0),
        ("counts.train", 10**9),
        ("counts.test", -1),
        ("counts.more", 1),
        ("counts", DELETE),
        ("widths.train", 2**45),
        ("widths.train", 0),
        ("outputs", 3_000_000_000),
        ("outputs", 0),
        ("input_shape", []),
        ("input_shape", [0]),
        ("input_shape", [2**40]),
        ("input_shape", [1] * 9),
        ("input_dtype", "float64"),
        ("stored_dtype", "object"),
        ("stored_dtype", ["uint8"]),
        ("target", ["int32"]),
        ("target", ["S9", []]),
        ("constants", {"more": ["float32", []]}),
        ("classes", []),
        ("classes", ["no", "yes\n"]),
        ("classes", ["no", "yes\x9b2J"]),
        ("classes", ["no", "\u202eyes"]),
        ("classes", ["no", "\ud800"]),
        ("classes", ["no", "y" * 201]),
        ("classes", ["no", 1]),
        ("input", PLANTED),
        ("sums.mean", [math.inf, 0]),
        ("sums.mean", ["1", 0]),
        ("sums.mean", [1e31, 0]),
        ("sums.m2", [-1, 0]),
        ("sums.n", 0),
        ("normalise.features", [1, 0, 0]),
        (PLANTED, 1),
    ],
)
def test_a_description_out_of_bounds(path: str, value: Any):
    schema.NODE_DESCRIPTION(DESCRIPTION, "described")
    with pytest.raises(InvalidError) as error:
        schema.NODE_DESCRIPTION(replace_at(DESCRIPTION, path, value), "described")
    line = str(error.value)
    assert "described" in line
    assert PLANTED not in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kind", "shutdown"),
        ("kind", ["train"]),
        ("kind", DELETE),
        ("run", "../1f0a"),
        ("run", "1F"),
        ("client", "0"),
        ("client", -1),
        ("client", 10**7),
        ("round", 10**9),
        ("round", 1.0),
        ("settled", -2),
        ("last", True),
        ("settings", [1]),
        ("settings.a/b", 1),
        ("settings.learning_rate", 1e301),
        ("settings.learning_rate", 2**60),
        ("settings.learning_rate", "x" * 1001),
        ("settings.mlp.hidden", [1] * 1001),
        ("federation.counts", []),
        ("federation.counts.1.train", -13),
        ("federation.held_out", -1),
        ("federation.groups", 0),
        ("federation.alike.outputs", 10**7),
        ("federation.deviation", [0, 1]),
        ("federation.mean", [1e31, 0]),
        ("federation.more", 1),
    ],
)
def test_a_request_out_of_bounds(path: str, value: Any):
    schema.REQUEST(TRAIN, "message")
    with pytest.raises(InvalidError):
        schema.REQUEST(replace_at(TRAIN, path, value), "message")
    content = wire.encode(
        replace_at({"facts": TRAIN}, f"facts.{path}", value)["facts"], envelope={}
    )
    with pytest.raises(InvalidError):
        wire.decode(content, len(content), schema.REQUEST)


def test_the_depth_of_settings_is_limited():
    deep: Any = 1
    for _ in range(9):
        deep = [deep]
    with pytest.raises(InvalidError):
        schema.REQUEST(replace_at(TRAIN, "settings.learning_rate", deep), "message")


@pytest.mark.parametrize("shape", [[0, 2**39, 2**39], [2**39, 0, 2**39], [2**40], [0] * 33, [-1]])
def test_an_array_of_an_impossible_shape(shape: list[int]):
    """NumPy refuses some shapes without elements."""
    head = json.dumps({"facts": {}, "arrays": [["upload/w", "float32", shape]]}).encode()
    lengths = [len(part).to_bytes(8, "little") for part in (b"{}", head)]
    content = b"".join([b"fedjax_pfl 1\n", lengths[0], b"{}", lengths[1], head])
    with pytest.raises(InvalidError, match="its head describes an array"):
        wire.decode(content, len(content))


@pytest.mark.parametrize("envelope", [{"start": -1}, {"start": "0"}, {"more": 1}])
def test_an_envelope_out_of_bounds(envelope: Any):
    content = wire.encode({}, envelope=envelope)
    with pytest.raises(InvalidError, match="envelope"):
        wire.decode(content, len(content))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"dataset": "digits", "clients": 2}, "client"),
        ({"dataset": "digits", "partition": "iid"}, "needs clients"),
        ({"dataset": "digits", "client": -1}, "client"),
        ({"dataset": "digits", "csv": {"label": "x"}}, "csv"),
        ({"dataset": "digits", "learning_rate": 1}, "without fields but"),
        ({"dataset": "csv:x", "labels": 0}, "labels"),
        ({"dataset": "csv:x", "labels": ["a\nb"]}, "labels"),
        ({"dataset": "csv:x", "words": {"city": []}}, "words"),
        ({"dataset": "csv:x", "least_rows": 0}, "least_rows"),
        ({"dataset": "csv:x", "code": ["os"]}, "code"),
        ({"code": []}, "dataset"),
        ([], "object"),
    ],
)
def test_a_nodes_file_out_of_bounds(content: Any, word: str, tmp_path: Path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=word) as error:
        node_file.read(path)
    assert "\n" not in str(error.value)


def test_a_nodes_file():
    content = {"client": 1, "dataset": "csv:x", "csv": {"label": "y"}, "labels": 3, "code": ["a:b"]}
    file = node_file.parse(content, "node.json")
    assert file == node_file.NodeFile(
        {"dataset": "csv:x", "csv": {"label": "y"}}, 1, 3, {}, 20, ("a:b",)
    )


@pytest.mark.parametrize(
    ("form", "content"),
    [
        (
            schema.DEPLOYED,
            {"run": RUN, "federation": replace_at(FEDERATION, "counts.0.train", "many")},
        ),
        (schema.DEPLOYED, []),
        (schema.KEYS, {"00": DIGEST}),
        (schema.ENROLLED, {"client": 0, "examples": DIGEST}),
        (schema.OUTCOME, {"error": 1}),
    ],
)
def test_an_invalid_file_is_a_usage_error(form: Any, content: Any, tmp_path: Path):
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"x\.json cannot be read"):
        storage.read_json(tmp_path / "x.json", form)
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"x\.json cannot be read"):
        storage.read_json(tmp_path / "x.json", form)
    assert storage.read_json(tmp_path / "no.json", form) == {}


def test_lines_are_escaped_and_cut():
    text = "one\ntwo\x1b[2J\r\u202ethree\ud800 é²"
    assert lines.one_line(text) == "one\\ntwo\\x1b[2J\\r\\u202ethree\\ud800 é²"
    assert len(lines.one_line("\n" * 5000)) == lines.MAX_LENGTH
