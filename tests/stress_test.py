"""A small pass of each of the long tries in tests/stress."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.stress import __main__ as stress
from tests.stress import attacks, common
from tests.stress.cohort import missing, spoilt
from tests.stress.common import CONFIG, Row, scratch, table
from tests.stress.data import data
from tests.stress.disk import disk
from tests.stress.kills import kills
from tests.stress.long import long
from tests.stress.relay import Counted, relay
from tests.stress.rot import rot
from tests.stress.same import distance

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
def test_missing_clients_and_bad_uploads():
    """The contract suite tries the first for every algorithm."""
    assert_nothing_lost(missing(6, ("fedper",)), 1)
    for row in spoilt(("local", "fedper")):
        assert_nothing_lost([row], 1)


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


def test_distances_are_relative_to_a_leafs_largest_value():
    one = {"w": np.array([1.0, -4.0]), "n": np.zeros(2)}
    assert distance(one, one) == 0
    assert distance(one, {**one, "w": np.array([1.5, -4.0])}) == 0.125
    assert distance(one, {**one, "n": np.array([0.0, 1e-7])}) == pytest.approx(0.1)


def test_the_one_table_has_every_try(monkeypatch):
    """Each script's function is called, with the numbers that the page gives."""
    asked = {}

    def noted(name):
        return lambda *arguments: asked.update({name: arguments}) or [Row(name, 1, 1, 0)]

    scripts = {path.stem for path in Path(stress.__file__).parent.glob("*.py")}
    functions = {"each", "missing", "spoilt", "stores"} | scripts - {
        "__init__",
        "__main__",
        "common",
        "cohort",
        "damages",
        *("federation", "away", "over_flower", "relay"),  # a table of its own, of another page
    }
    for name in functions:
        monkeypatch.setattr(stress, name, noted(name))
    rows = stress.everything()
    assert set(rows) == functions == set(asked)
    assert [rows[name][0].kind for name in rows] == list(rows)
    assert asked == {
        "kills": (100, 0),
        "each": (1, 0),
        "rot": (100, 0),
        "disk": (24, 0),
        "data": (100, 0),
        "missing": (50,),
        "spoilt": (),
        "same": (),
        "processes": (12, 0),
        "long": (2000, 20),
        "attacks": (1.0, 0),
        "stores": (1.0, 0),
    }
    assert set(stress.everything(only=["rot", "same"])) == {"rot", "same"}
    stress.everything(0.01)
    assert asked["processes"] == (4, 0)  # one of each kind


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


def test_a_file_of_each_kind_is_damaged(tmp_path):
    there = [
        "config.json",
        "figures/a.png",
        "figures/b.png",
        "checkpoints/2/SHA256SUMS",
        "checkpoints/2/state/d/" + "0" * 32,
        "checkpoints/4/state/d/" + "1" * 32,
        "checkpoints/4/state/d/" + "2" * 32,
        "checkpoints/4/state/x/d/" + "3" * 32,
        "tensorboard/events.1",
        "tensorboard/events.2",
    ]
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert set(attacks.kinds(tmp_path)) == {
        "config.json",
        "figures/.png",
        "tensorboard/",
        "checkpoints/before/SHA256SUMS",
        "checkpoints/before/state",
        "checkpoints/4/state/d/DIGEST",
        "checkpoints/4/state/x/d/DIGEST",
    }


@pytest.mark.slow("commands on damaged directories")
def test_some_attacks():
    """One of each; the command tries them all."""
    for row in [*attacks.directory(share=0.01), *attacks.names()]:
        assert row.lost == 0, table([row])


def test_the_table_is_markdown():
    rows = [Row("SIGKILL", 10, 9, 1, "why"), Row("x", 1, 1, 0)]
    assert table(rows).splitlines() == [
        "| fault   | tried | survived | lost | note |",
        "| ------- | ----: | -------: | ---: | ---- |",
        "| SIGKILL |    10 |        9 |    1 | why  |",
        "| x       |     1 |        1 |    0 |      |",
    ]
    assert CONFIG["rounds"] % CONFIG["eval_every"] == 0


def test_bytes_are_handed_on_and_counted():
    async def all_of_it() -> tuple[bytes, Counted]:
        async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(2 * await reader.read(100))
            writer.close()

        there = await asyncio.start_server(shout, "127.0.0.1", 0)
        counted = Counted()
        between = await relay(0, there.sockets[0].getsockname()[1], counted)
        port = between.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hallo")
        heard = await reader.read()
        for one in (writer, there, between):
            one.close()
            await one.wait_closed()
        return heard, counted

    heard, counted = asyncio.run(all_of_it())
    assert heard == b"hallohallo"
    assert (counted.up, counted.down) == (5, 10)


@SLOW
def test_a_federation_whose_processes_are_killed(tmp_path: Path):
    pytest.importorskip("flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it")
    from tests.stress import federation

    wanted = (federation.app, federation.worker, federation.same_key)
    faults = [one for one in federation.FAULTS if one.do in wanted]
    tried = federation.federation(tmp_path / "run", faults, np.random.default_rng(0))
    assert [one.kind for one in tried] == [*(one.kind for one in faults), federation.END]
    assert [one.wrong for one in tried] == [""] * 4
    assert (
        federation.away(5) == [federation.Tried("two of six nodes absent in a round", "", 0.0)] * 5
    )
