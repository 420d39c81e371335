"""Specifications of messages and files: invalid values are refused without quoting them."""

import copy
import json
import math

import pytest

from fedjax_pfl.deploy import lines, node_file, schema, storage, wire
from fedjax_pfl.deploy.schema import InvalidError
from tests.commands import message
from tests.deploy.loopback import RUN

PLANTED = "Person0"
DIGEST = "0" * 64
SPLITS = {"train": 30, "validation": 0, "test": 10}
DESCRIPTION = {
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
SHARED = ("input_shape", "input_dtype", "outputs", "each", "target", "constants")
FEDERATION = {
    "counts": [dict(SPLITS)] * 2,
    "held_out": 0,
    "groups": 1,
    "alike": {name: DESCRIPTION[name] for name in SHARED},
    "widths": DESCRIPTION["widths"],
    "stored_dtype": "float32",
    "mean": [1.5, 0],
    "deviation": [2.5, 1],
}
TRAIN = {
    **{"kind": "train", "run": RUN, "client": 1, "round": 3, "settled": -1},
    "settings": {"mlp": {"hidden": [4]}, "learning_rate": 0.1, "groups": [{"model": "mlp"}]},
    "federation": FEDERATION,
}


def replace_at(content, path, value):
    """Returns the content with another value at a path such as counts.train, or without it."""
    changed = place = copy.deepcopy(content)
    *outer, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    for name in outer:
        place = place[name]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return changed


DELETE = object()


def members(table):
    """Returns pairs of a path and a value from a table of values by path."""
    return [(path, value) for path, values in table.items() for value in values]


BAD_DESCRIPTIONS = {
    "counts.train": ["many", -5, 0, True, 30.0, 10**9],
    "counts.test": [-1],
    "counts.more": [1],
    "counts": [DELETE],
    "widths.train": [2**45, 0],
    "outputs": [3_000_000_000, 0],
    "input_shape": [[], [0], [2**40], [1] * 9],
    "input_dtype": ["float64"],
    "stored_dtype": ["object", ["uint8"]],
    "target": [["int32"], ["S9", []]],
    "constants": [{"more": ["float32", []]}],
    "classes": [[]],
    "classes.1": ["yes\n", "yes\x9b2J", "\u202eyes", "\ud800", "y" * 201, 1],
    "input": [PLANTED],
    "sums.mean": [[math.inf, 0], ["1", 0], [1e31, 0]],
    "sums.m2": [[-1, 0]],
    "sums.n": [0],
    "normalise.features": [[1, 0, 0]],
    PLANTED: [1],
}
BAD_REQUESTS = {
    "kind": ["shutdown", ["train"], DELETE],
    "run": ["../1f0a", "1F"],
    "client": ["0", -1, 10**7],
    "round": [10**9, 1.0],
    "settled": [-2],
    "last": [True],
    "settings": [[1]],
    "settings.a/b": [1],
    "settings.learning_rate": [1e301, 2**60, "x" * 1001, [[[[[[[[[1]]]]]]]]]],
    "settings.mlp.hidden": [[1] * 1001],
    "federation.counts": [[]],
    "federation.counts.1.train": [-13],
    "federation.held_out": [-1],
    "federation.groups": [0],
    "federation.alike.outputs": [10**7],
    "federation.deviation": [[0, 1]],
    "federation.mean": [[1e31, 0]],
    "federation.more": [1],
}


@pytest.mark.parametrize(("path", "value"), members(BAD_DESCRIPTIONS))
def test_a_description_out_of_bounds(path, value):
    schema.NODE_DESCRIPTION(DESCRIPTION, "described")
    with pytest.raises(InvalidError) as error:
        schema.NODE_DESCRIPTION(replace_at(DESCRIPTION, path, value), "described")
    line = str(error.value)
    assert "described" in line
    assert PLANTED not in line
    assert "\n" not in line


@pytest.mark.parametrize(("path", "value"), members(BAD_REQUESTS))
def test_a_request_out_of_bounds(path, value):
    schema.REQUEST(TRAIN, "message")
    changed = replace_at(TRAIN, path, value)
    with pytest.raises(InvalidError):
        schema.REQUEST(changed, "message")
    content = wire.encode(changed, envelope={})
    with pytest.raises(InvalidError):
        wire.decode(content, len(content), schema.REQUEST)


@pytest.mark.parametrize("shape", [[0, 2**39, 2**39], [2**39, 0, 2**39], [2**40], [0] * 33, [-1]])
def test_an_array_of_an_impossible_shape(shape):
    """NumPy refuses some shapes without elements."""
    head = json.dumps({"facts": {}, "arrays": [["upload/w", "float32", shape]]}).encode()
    lengths = [len(part).to_bytes(8, "little") for part in (b"{}", head)]
    content = b"".join([b"fedjax_pfl 1\n", lengths[0], b"{}", lengths[1], head])
    with pytest.raises(InvalidError, match="its head describes an array"):
        wire.decode(content, len(content))


@pytest.mark.parametrize("envelope", [{"start": -1}, {"start": "0"}, {"more": 1}])
def test_an_envelope_out_of_bounds(envelope):
    content = wire.encode({}, envelope=envelope)
    with pytest.raises(InvalidError, match="envelope"):
        wire.decode(content, len(content))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "cannot be read as JSON"),
        ("\xff", "cannot be read as JSON"),
        ([], "must be an object"),
        ({"code": []}, "dataset"),
        ({"dataset": {"a": 1}}, "dataset is"),
        ({"dataset": "nope"}, "there is no dataset 'nope'"),
        ({"dataset": "digits", "clients": 2}, "client"),
        ({"dataset": "digits", "partition": "iid"}, "needs clients"),
        ({"dataset": "digits", "client": -1}, "client"),
        ({"dataset": "csv:x", "client": "0"}, "client must be a whole number"),
        ({"dataset": "digits", "csv": {"label": "x"}}, "csv"),
        ({"dataset": "csv:x", "csv": 5}, "csv is a group"),
        ({"dataset": "csv:x", "split": "all"}, "split is 'all'"),
        ({"dataset": "digits", "learning_rate": 1}, "without fields but"),
        ({"dataset": "csv:x", "labels": 0}, "labels"),
        ({"dataset": "csv:x", "labels": ["a\nb"]}, "labels"),
        ({"dataset": "csv:x", "labels": ["a", "a"]}, "a word of labels twice"),
        ({"dataset": "digits", "labels": 10}, "has labels, which only a file of the node needs"),
        ({"dataset": "digits", "words": {"a": 2}}, "has words, which only a file of the node"),
        ({"dataset": "csv:x", "words": {"city": []}}, "words"),
        ({"dataset": "csv:x", "words": {"city": ["a", "a"]}}, "a word of city twice"),
        ({"dataset": "csv:x", "least_rows": 0}, "least_rows"),
        ({"dataset": "csv:x", "code": ["os"]}, "code"),
        ({"dataset": "csv:x", "code": 5}, "code must be a list"),
    ],
)
def test_errors_in_a_nodes_file(content, word, tmp_path):
    path = tmp_path / "node.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="latin-1")
    line = message(node_file.read, path)
    assert line.startswith(str(path))
    assert word in line


def test_a_nodes_file():
    content = {"client": 1, "dataset": "csv:x", "csv": {"label": "y"}, "labels": 3, "code": ["a:b"]}
    data = {"dataset": "csv:x", "csv": {"label": "y"}}
    expected = node_file.NodeFile(data, 1, 3, {}, 20, ("a:b",))
    assert node_file.parse(content, "node.json") == expected


@pytest.mark.parametrize(
    ("form", "content"),
    [
        (schema.DEPLOYED, {"federation": replace_at(FEDERATION, "counts.0.train", "many")}),
        (schema.DEPLOYED, []),
        (schema.KEYS, {"00": DIGEST}),
        (schema.ENROLLED, {"client": 0, "examples": DIGEST}),
        (schema.OUTCOME, {"error": 1}),
    ],
)
def test_an_invalid_file_is_a_usage_error(form, content, tmp_path):
    for text in (json.dumps(content), "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        assert "x.json cannot be read" in message(storage.read_json, tmp_path / "x.json", form)
    assert storage.read_json(tmp_path / "no.json", form) == {}


def test_lines_are_escaped_and_cut():
    text = "one\ntwo\x1b[2J\r\u202ethree\ud800 é²"
    assert lines.one_line(text) == "one\\ntwo\\x1b[2J\\r\\u202ethree\\ud800 é²"
    assert len(lines.one_line("\n" * 5000)) == lines.MAX_LENGTH
