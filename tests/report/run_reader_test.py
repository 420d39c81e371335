"""Tests of reading run directories, intact and damaged."""

import json

import pytest

from fedjax_pfl.report import comparison, comparison_page, run_reader
from fedjax_pfl.report.run_index import RunIndex
from fedjax_pfl.runs import export
from tests.commands import message
from tests.report.comparison_test import rows_of, settings, write_run

DEEP = "[" * 1000 + "]" * 1000
DAMAGE = {
    "metrics.jsonl": [
        "[1, 2]\n",
        '"words"\n',
        '{"round": "ten", "before": {"accuracy_mean": 0.5}}\n',
        '{"round": 10, "before": {"accuracy_mean": "half"}}\n',
        '{"round": 10, "before": [0.5]}\n',
        '{"round": 10, "before": {"accuracy_mean": 0.5}, "bytes_down": "many"}\n',
        '{"round": true, "before": {"accuracy_mean": 0.5}}\n',
        f'{{"round": 10, "before": {{"accuracy_mean": 1{"0" * 400}}}}}\n',
        '{"round": 10, "before": {"accuracy_mean": 0.5}, "attack_success": 0.5}\n',
        '{"round": 10, "before": {"accuracy_mean": 0.5}, "attack_success": {"after": "x"}}\n',
        f'{{"round": {DEEP}}}\n',
        "{\n",
    ],
    "config.json": [
        "[]",
        "{",
        '{"seed": 0}',  # and no rounds
        '{"seed": "zero", "rounds": 1}',
        '{"seed": true, "rounds": 1}',
        '{"phases": [1], "rounds": 1}',
        '{"algorithm": ["fedavg"], "rounds": 1}',
        '{"classes": 4, "rounds": 1}',
        f'{{"rounds": 1, "clients": {DEEP}}}',
        '{"a":' * 1000 + "1" + "}" * 1000,
        '{"a":' * 100_000,
    ],
    "clients.csv": [
        "",
        "client,active\n",
        "words\n1\n",
        "client,active,test_examples,before_accuracy\n0,1,many,0.5\n",
        "client,active,test_examples,before_accuracy\n0,1\n",
        "client,active,test_examples,before_accuracy\n0,1,2,0.5,9,9\n",
    ],
    "confusion.json": [
        '{"before": [[1]]}',
        '{"classes": 2, "before": [[1, 0], [1]]}',
        '{"classes": 1, "after": [[1.5]]}',
        '{"classes": 1, "after": 3}',
    ],
    "traffic.json": ["[]", '{"down": 3}', '{"down": {"fc": "many"}}', '{"total_down": []}'],
}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [0.5, 0.6, 0.7], settings())


@pytest.mark.parametrize(
    ("name", "content"), [(n, c) for n, contents in DAMAGE.items() for c in contents]
)
def test_damaged_file_is_refused_in_one_line(run, name, content):
    (run / name).write_text(content)
    line = message(comparison.read, run)
    assert line.startswith(f"{run / name} is damaged (")
    assert len(line) < len(str(run)) + 200
    if name == "config.json":
        assert "is damaged" in message(export.load_result, run)
        assert RunIndex(run.parent).runs == {}  # skipped, as it may be being written


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("content", [b"\x00\xff\xfe\x80", b"\x89PNG\r\n\x1a\n" + bytes(range(256))])
def test_binary_content_is_refused(run, name, content):
    (run / name).write_bytes(content)
    assert "is damaged" in message(comparison.read, run)


def test_folder_instead_of_a_file_is_refused(run):
    (run / "provenance.json").mkdir()
    assert comparison.read(run).provenance == {}
    (run / "config.json").unlink()
    (run / "config.json").mkdir()
    assert "lacks config.json" in message(comparison.read, run)


def test_cells_are_read_as_numbers(run):
    record = run_reader.read(run)
    cells = {"client": 0, "active": 1, "test_examples": 10}
    assert record.clients[2] == {**cells, "before_accuracy": 0.5, "after_accuracy": 0.55}
    assert record.clients[1]["before_accuracy"] is None
    assert (record.seed, record.finished, record.config["clients"]) == (0, True, 3)


def test_the_success_of_a_backdoor_is_read(run):
    success = {"before": 0.75, "after": None}
    line = {
        "round": 10,
        "before": {"accuracy_mean": 0.5},
        "attackers": 1,
        "attack_success": success,
    }
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert comparison.read(run).metrics == [line]


def test_unfinished_run_may_have_an_incomplete_last_line(tmp_path):
    path = write_run(tmp_path / "a", [0.5], settings(), finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 15, "bef')
    assert [line["round"] for line in run_reader.read(path).metrics] == [5, 10]
    lines = (path / "metrics.jsonl").read_text().split("\n")
    (path / "metrics.jsonl").write_text("\n".join([lines[0], "{", lines[1]]))
    assert "damaged" in message(run_reader.read, path)


def test_markdown_escapes_html(tmp_path):
    hostile = '<img src=x onerror="alert(1)">'
    paths = [
        write_run(tmp_path / str(i), [0.5], settings() | {"dataset": dataset})
        for i, dataset in enumerate((hostile, "digits"))
    ]
    text = comparison_page.markdown(rows_of(*paths))
    assert "<" not in text
    assert "&lt;img" in text
    assert json.dumps(hostile)[1:5] not in text
