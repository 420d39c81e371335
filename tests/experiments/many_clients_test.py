"""Tests of the measurement of many clients: its data, its processes and its results."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from experiments import many_clients
from experiments.libraries.rivals import Gone
from fedjax_pfl.simulation.cohort_examples import cohort_data
from tests.commands import Flags, message

CHECKOUTS = Path(__file__).parents[1] / "checkouts"
ROW = {
    "clients": 100,
    "peak": 2**30,
    "step": 0.02,
    "few_step": 0.02,
    "rounds_between": 1.0,
    "evaluation": 0.5,
    "written": 0,
    "store": "disk",
}


def test_clients_share_a_pool():
    functions, data = many_clients.make_functions("local", 1000, 100)
    assert data.x.shape == (20_000, 32, 32, 3)
    assert data.train.rows.shape == (1000, 40)
    assert len(functions.spec.evaluated_ids) == 250
    cohort = cohort_data(data, np.array([3, 999]), 200, test=True)
    for place, i in enumerate((3, 999)):
        for part in ("train", "test"):
            (rows, _), (all_rows, _) = getattr(cohort, part), getattr(data, part)
            np.testing.assert_array_equal(cohort.x[rows[place]], data.x[all_rows[i]])
            np.testing.assert_array_equal(cohort.y[rows[place]], data.y[all_rows[i]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"server": True, "model": "mlp"}, "--model has no effect with --server"),
        ({"server": True, "written": 5}, "--written has no effect with --server"),
        ({"server": True, "pfllib": "a"}, "--pfllib has no effect with --server"),
        ({"server": True, "picture": "a.svg"}, "--picture has no effect with --server"),
        ({"hidden": 4}, "--hidden has no effect without --server"),
        ({"server": True, "hidden": 4}, "--hidden has no effect without pfedla in --methods"),
        ({"store": "device", "written": 5}, "--written has no effect with --store=device"),
        ({"pfllib": "a", "rounds": 2}, "--rounds has no effect with --pfllib"),
        ({"fl_bench": "a", "model": "mlp"}, "--model has no effect with --fl_bench"),
        ({"pfllib_python": "a"}, "--pfllib_python has no effect without --pfllib"),
        ({"limit": 9.0}, "--limit has no effect without another library"),
    ],
)
def test_flags_that_a_measurement_does_not_read_are_refused(options, expected, monkeypatch):
    defaults = {"server": False, "only": "", "store": "disk", "methods": ["local"]}
    monkeypatch.setattr(flags, "FLAGS", Flags(defaults, **options))
    assert message(many_clients.main, sys.argv[:1]) == f"{expected}; leave it out"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clients": ["100", "1e4"]}, "--clients has '1e4'; give whole numbers from 1"),
        ({"clients": ["0"]}, "--clients has '0'; give whole numbers from 1"),
        ({"out": "/nowhere/rows.json"}, "--out=/nowhere/rows.json is in no folder that exists"),
        ({"picture": "/nowhere/a.svg"}, "--picture=/nowhere/a.svg is in no folder that exists"),
        ({"store": "sharded"}, "--store=sharded is measured with --server; choose another store"),
        ({"only": "local"}, "--only=local is not METHOD:CLIENTS"),
    ],
)
def test_wrong_flags_are_refused_before_any_process(options, expected, tmp_path, monkeypatch):
    values = {
        "server": False,
        "only": "",
        "methods": ["local"],
        "clients": ["100"],
        "store": "disk",
    }
    values |= {"out": str(tmp_path / "a.json"), "picture": str(tmp_path / "a.svg")} | options
    monkeypatch.setattr(flags, "FLAGS", Flags(**values))
    monkeypatch.setattr(many_clients.subprocess, "run", lambda *_, **__: pytest.fail("it runs"))
    assert message(many_clients.main, sys.argv[:1]) == expected


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls the command with measurements that take no time, and returns the file it writes."""

    def call(rows, returncode=0, **options):
        def run(command, **_):
            cohort = {"cohort": 4} if options.get("server") else {}
            row = json.dumps({**ROW, **cohort})
            return subprocess.CompletedProcess(command, returncode, row, "")

        values = {"server": False, "only": "", "methods": ["local"], "clients": ["100"]}
        values |= {"store": "disk", "cohort": 100, "rounds": 3, "written": 0, "model": "lenet"}
        values |= {"out": str(tmp_path / "a.json"), "picture": str(tmp_path / "a.svg")}
        (tmp_path / "a.json").write_text(json.dumps(rows))
        monkeypatch.setattr(flags, "FLAGS", Flags(values, **options))
        monkeypatch.setattr(many_clients.subprocess, "run", run)
        monkeypatch.setattr(many_clients.server_share, "line", lambda row: "")
        many_clients.main(sys.argv[:1])
        return json.loads((tmp_path / "a.json").read_text())

    return call


def test_rows_of_a_file_have_the_same_cohort(call, tmp_path):
    """Rows that do not state a cohort, as recorded ones, have 100 clients in it."""
    old = {"fedper": [{**ROW, "ok": True}]}
    line = f"{tmp_path / 'a.json'} has results of fedper with cohort 100, not 50; give another "
    assert message(partial(call, old, cohort=50)) == f"{line}--out"
    new = call(old, cohort=100)
    assert (new["fedper"], new["local"][0]["cohort"]) == (old["fedper"], 100)
    assert message(partial(call, call({}, cohort=50), cohort=100)) == (
        f"{tmp_path / 'a.json'} has results of local with cohort 50, not 100; give another --out"
    )


def test_the_server_is_measured_with_several_cohorts(call):
    """The cohort is a column of its table, so only the same cohort is not measured again."""
    old = {"pfedla": [{**ROW, "cohort": 2, "ok": True}]}
    options = {"server": True, "methods": ["pfedla"]}
    assert call(old, cohort=2, **options) == old
    assert [row["cohort"] for row in call(old, cohort=4, **options)["pfedla"]] == [2, 4]


def test_other_conditions_replace_a_row(call):
    """Recorded rows do not state their conditions, so they count as measured."""
    old = {"local": [{**ROW, "ok": True}]}
    assert call(old, rounds=9)["local"] == old["local"]
    rows = call(call({}), rounds=9)["local"]
    assert [row["rounds"] for row in rows] == [9]
    (row,) = call({"local": rows}, rounds=9, written=50)["local"]
    assert row["written_before"] == 50


def test_a_failure_does_not_replace_numbers(call):
    good = call({})["local"]
    both = call({"local": good}, returncode=-9, rounds=9)["local"]
    assert [(row["ok"], row["rounds"]) for row in both] == [(True, 3), (False, 9)]
    assert [row["rounds"] for row in call({"local": both}, rounds=9)["local"]] == [9]


def test_a_damaged_file_is_told(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    values = {"server": False, "only": "", "methods": ["local"], "clients": ["1"], "store": "disk"}
    monkeypatch.setattr(flags, "FLAGS", Flags({**values, "out": str(path), "cohort": 100}))
    for text in ("{", "[1]", '{"local": [1]}'):
        path.write_text(text)
        line = f"{path} has no results of this command; give another --out"
        assert message(many_clients.main, sys.argv[:1]) == line


def test_every_store_has_its_own_curve():
    rows = [{**ROW, "clients": n, "store": s, "ok": n < 9} for n in (3, 9, 1) for s in "ab"]
    library = [{"clients": 5, "peak": 2**30, "ok": True}]
    curves = many_clients.curves({"local": rows, "fedper": rows[::2], "PFLlib, fedavg": library})
    assert {label: [row["clients"] for row in curve] for label, curve in curves.items()} == {
        "local, a": [1, 3],
        "local, b": [1, 3],
        "fedper": [1, 3],
        "PFLlib, fedavg": [5],
    }


def test_each_number_of_clients_is_measured_once_in_its_own_process(tmp_path, monkeypatch, capsys):
    measured = []

    def run(arguments, **options):
        measured.append(arguments[-1])
        if arguments[-1] == "--only=local:1000":
            return subprocess.CompletedProcess(arguments, 1, "", "it is full\n")
        return subprocess.CompletedProcess(arguments, 0, "log line\n" + json.dumps(ROW) + "\n", "")

    out = tmp_path / "rows.json"
    flag_values = Flags(
        clients=["100", "1000"],
        methods=["local"],
        store="disk",
        cohort=100,
        rounds=3,
        written=0,
        only="",
        server=False,
        model="lenet",
        picture=str(tmp_path / "picture.svg"),
        out=str(out),
    )
    monkeypatch.setattr(flags, "FLAGS", flag_values)
    monkeypatch.setattr(many_clients.subprocess, "run", run)
    for _ in range(2):
        many_clients.main(sys.argv[:1])
    assert measured == ["--only=local:100", "--only=local:1000", "--only=local:1000"]  # it failed
    assert "local, 1000 clients, disk: it is full" in capsys.readouterr().out
    assert [row["ok"] for row in json.loads(out.read_text())["local"]] == [True, False]
    picture = (tmp_path / "picture.svg").read_bytes()
    many_clients.main(sys.argv[:1])
    assert len(picture) > 1000
    assert (tmp_path / "picture.svg").read_bytes() == picture
    measured.clear()

    def measure_library(start, checkout, clients, cohort, most, limit):
        measured.append((Path(start[1]).name, clients, cohort, most, limit))
        if clients == 1000:
            raise Gone("it has no room")
        return {"clients": clients, "peak": 2**31}

    values = {"clients": ["10000", "1000", "100"], "out": str(out), "only": "", "server": False}
    values |= {"picture": str(tmp_path / "picture.svg"), "cohort": 100}
    values |= {"pfllib": str(CHECKOUTS / "pfllib"), "most": 12.0, "limit": 60.0}
    monkeypatch.setattr(flags, "FLAGS", Flags({"methods": ["local"], "store": "disk"}, **values))
    monkeypatch.setattr(many_clients, "measure_library", measure_library)
    monkeypatch.setattr(many_clients.rivals, "commit", lambda path: "d832e76")
    many_clients.main(sys.argv[:1])  # larger numbers are not tried after a failure
    rival = "rival_pfllib.py"
    assert measured == [(rival, n, 100, 12.0, 60.0) for n in (100, 1000)]
    many_clients.main(sys.argv[:1])  # what failed is measured again
    assert [call[1] for call in measured] == [100, 1000, 1000]
    assert "pfllib, 1000 clients: it has no room" in capsys.readouterr().out
    rows = json.loads(out.read_text())
    assert [row["ok"] for row in rows["PFLlib, fedavg"]] == [True, False]
    assert len(rows["local"]) == 2
    assert (tmp_path / "picture.svg").read_bytes() != picture


@pytest.mark.slow("compiles LeNet's programs twice")
def test_measured_row():
    row = many_clients.measure("fedper", 12, 4, 1, "disk", 5)
    assert 5 * 3400 <= row["written"] <= 12 * 3400  # heads, each once
    assert 0 < row["step"] < 60
    assert row["peak"] > 1e8
