"""A small part of each campaign in tests/stress."""

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

SLOW = pytest.mark.slow("many processes; the rules have their own tests")


@pytest.fixture(autouse=True, scope="module")
def programs() -> Iterator[None]:
    with scratch():
        yield


def assert_nothing_lost(rows: list[Row], tried: int) -> None:
    assert rows[0].tried == tried
    assert rows[0].survived == tried, table(rows)
    assert not any(row.lost for row in rows)


@SLOW
def test_a_killed_run_resumes():
    assert_nothing_lost(kills(1, config={**CONFIG, "rounds": 8}), 1)


@SLOW
def test_a_run_resumes_after_a_disk_fault():
    assert_nothing_lost(disk(1), 1)


@SLOW
@pytest.mark.parametrize("store", ["device", "disk"])
def test_damaged_checkpoints_are_reported(store):
    assert_nothing_lost(rot(12, config=CONFIG | common.STORES[store]), 12)


@SLOW
def test_damaged_datasets_are_reported():
    assert_nothing_lost(data(6), 6)


@SLOW
def test_a_long_run_is_measured():
    rows = long(24, 2)
    assert rows[0].tried == 1  # too short for its times and memory
    assert "12 calls" in rows[0].note


def test_new_rows_replace_the_old_rows_of_a_campaign(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "MEASURED", tmp_path / "measured.json")
    stress.keep({"rot": [Row("a", 1, 1, 0)], "kills": [Row("b", 1, 1, 0)]})
    stress.keep({"rot": [Row("c", 2, 2, 0)]})
    record = json.loads((tmp_path / "measured.json").read_text())
    assert list(record) == ["kills", "rot"]
    assert record["rot"]["rows"] == [["c", 2, 2, 0, ""]]


def test_the_stored_campaigns_are_complete_and_lost_nothing():
    record = json.loads(common.MEASURED.read_text())
    assert list(record) == list(stress.parts())
    for part in record.values():
        for row in (Row(*values) for values in part["rows"]):
            assert row.tried == row.survived > 0 == row.lost


def test_the_table_of_outcomes_is_markdown():
    rows = [Row("SIGKILL", 10, 9, 1, "why"), Row("x", 1, 1, 0)]
    assert table(rows).splitlines() == [
        "| fault   | tried | survived | lost | note |",
        "| ------- | ----: | -------: | ---: | ---- |",
        "| SIGKILL |    10 |        9 |    1 | why  |",
        "| x       |     1 |        1 |    0 |      |",
    ]
