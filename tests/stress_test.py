"""A small pass of each of the long tries in tests/stress."""

import json
from collections.abc import Iterator

import pytest

from tests.stress import __main__ as stress
from tests.stress import common
from tests.stress.common import CONFIG, Row, scratch, table
from tests.stress.data import data
from tests.stress.disk import disk
from tests.stress.kills import kills
from tests.stress.long import long
from tests.stress.rot import rot

SLOW = pytest.mark.slow("many processes; the rules themselves are tested where they are kept")


@pytest.fixture(autouse=True, scope="module")
def programs() -> Iterator[None]:
    with scratch():
        yield


def assert_nothing_lost(rows: list[Row], tried: int) -> None:
    assert rows[0].tried == tried
    assert rows[0].survived == tried, table(rows)
    assert not any(row.lost for row in rows)


@SLOW
def test_a_kill():
    """A process that is killed and goes on is in resume_test too."""
    assert_nothing_lost(kills(1, config={**CONFIG, "rounds": 8}), 1)


@SLOW
def test_a_disk():
    assert_nothing_lost(disk(1), 1)


@SLOW
@pytest.mark.parametrize("store", ["device", "disk"])
def test_damaged_checkpoints(store):
    assert_nothing_lost(rot(12, config=CONFIG | common.STORES[store]), 12)


@SLOW
def test_damaged_datasets():
    assert_nothing_lost(data(6), 6)


@SLOW
def test_a_run_that_is_not_long():
    rows = long(24, 2)
    assert rows[0].tried == 1  # so short, its times and memory say nothing
    assert "12 calls" in rows[0].note


def test_what_is_measured_anew_takes_the_place_of_what_was(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "MEASURED", tmp_path / "measured.json")
    stress.keep({"rot": [Row("a", 1, 1, 0)], "kills": [Row("b", 1, 1, 0)]})
    stress.keep({"rot": [Row("c", 2, 2, 0)]})
    there = json.loads((tmp_path / "measured.json").read_text())
    assert list(there) == ["kills", "rot"]
    assert there["rot"]["rows"] == [["c", 2, 2, 0, ""]]


def test_the_page_shows_every_try_and_nothing_lost():
    there = json.loads(common.MEASURED.read_text())
    assert list(there) == list(stress.parts())
    for part in there.values():
        for row in (Row(*each) for each in part["rows"]):
            assert row.tried == row.survived > 0 == row.lost


def test_the_table_is_markdown():
    rows = [Row("SIGKILL", 10, 9, 1, "why"), Row("x", 1, 1, 0)]
    assert table(rows).splitlines() == [
        "| fault   | tried | survived | lost | note |",
        "| ------- | ----: | -------: | ---: | ---- |",
        "| SIGKILL |    10 |        9 |    1 | why  |",
        "| x       |     1 |        1 |    0 |      |",
    ]
    assert CONFIG["rounds"] % CONFIG["eval_every"] == 0
