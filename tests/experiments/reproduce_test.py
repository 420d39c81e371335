"""The page that stands the papers' numbers beside ours, and the runs that are made for it."""

import json

import pytest

from experiments import reproduce
from experiments.papers.tables import TABLES
from experiments.reproduce import Options
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import runner
from fedjax_pfl.runs.interrupt import Stopped
from fedjax_pfl.settings import configuration
from tests.commands import message
from tests.report.comparison_test import made

# The page.

FULL = Options("pfedla/table1", "full", ("local/cifar10-n10", "*avg/cifar10-n10"), 2, rounds=60)


@pytest.fixture
def at_hand(monkeypatch):
    """All data but EMNIST's."""

    def require_available(name, data_dir=None):
        if name.startswith("emnist"):
            raise UsageError("get it there")

    monkeypatch.setattr(reproduce.data, "require_available", require_available)


def there(path, cell, seed, score, options=FULL, finished=True, **given):
    """A made-up run of a cell."""
    (one,) = [
        p
        for p in reproduce.plans(TABLES[options.table], options)
        if f"{p.cell.row}/{p.cell.column}" == cell
    ]
    config = one.config.copy_and_resolve_references()
    config.update(seed=seed, partition_seed=seed, **given)
    plain = json.loads(json.dumps(configuration.resolve(config)))
    return made(path, [score] * 3, plain, finished)


def shown(options, out):
    table, seeds = TABLES[options.table], options.seeds or reproduce.SCALES[options.scale]
    places = reproduce.collect(reproduce.plans(table, options), seeds, out)
    return reproduce.page(options, table, places, options.format)


def test_the_page_to_the_letter(tmp_path, at_hand):
    """Runs are known by their settings: the name of their folder says nothing."""
    cell = "local/cifar10-n10"
    there(tmp_path / "a", cell, 0, 0.6, data_dir="elsewhere", chunk=3)
    there(tmp_path / "b", cell, 1, 0.7)
    there(tmp_path / "c", cell, 2, 0.1)  # a third seed, which is not asked for
    there(tmp_path / "d", cell, 0, 0.1, learning_rate=0.5)
    there(tmp_path / "e", "fedavg/cifar10-n10", 1, 0.9, finished=False)
    lines = shown(FULL, tmp_path).splitlines()
    assert lines[6:10] == [
        "cifar10-n10",
        "               published          ours    gap  seeds         after                 remark",
        "local       59.44 ± 0.40  65.00 ± 7.07  +5.56      2  70.00 ± 7.07      too short to tell",
        "fedavg      48.57 ± 0.63       not run                              seed 1 is at round 10",
    ]
    assert lines[10:] == [
        "per_fedavg  52.54 ± 1.79       not run",
        "",
        "Not the published settings: rounds 60 instead of 600.",
    ]


def test_markdown_parsed_back(tmp_path, at_hand):
    there(tmp_path / "a", "local/cifar10-n10", 0, 0.6)
    text = shown(FULL._replace(format="markdown"), tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", "published", "ours", "gap", "seeds", "after", "remark"]
    assert cells[2][:5] == ["local", "59.44 ± 0.40", "60.00", "+0.56", "1"]
    assert cells[3][:3] == ["fedavg", "48.57 ± 0.63", "not run"]


def test_full_without_cells_is_the_whole_table(tmp_path, at_hand):
    text = shown(Options("pfedla/table1", "full"), tmp_path)
    assert text.count("not run") == 80  # ten rows, eight columns
    assert text.count("no BatchNorm in this network") == 4
    assert text.count("no data") == 18  # FedBN's two cells have another reason
    assert "The settings are the published ones" in text
    assert "18 cells: get it there" in text
    assert max(map(len, text.splitlines())) <= 100


def test_quick_says_what_it_leaves_out(tmp_path, at_hand):
    text = shown(Options("factorized_fl/table1"), tmp_path)
    assert text.count("not run") == 11
    papers, line, variants = text.partition("Variants of this library: --")
    assert line
    assert "\nbeta " in papers
    assert all(f"\n{row} " in variants for row in TABLES["factorized_fl/table1"].variants)
    said = " ".join(text.split())
    assert "Left out: cifar10-iid, cifar10-permuted-iid, cifar10-noniid, cifar10-GB, svhn" in said
    assert "dataset digits instead of cifar10" in said
    assert "rounds 10 instead of 50" in said
    assert "No gap is shown for runs on other data" in said
    own = " ".join(shown(Options("pfedla/table1"), tmp_path).split())
    assert "dataset digits" not in own
    assert "rounds 4 instead of 600; classes.examples 100 instead of 600" in own


def test_runs_are_shown_where_their_data_are_not_at_hand(tmp_path, at_hand):
    options = FULL._replace(cells=("local/emnist_digits-n10", "fedavg/emnist_digits-n10"), seeds=1)
    there(tmp_path / "a", "local/emnist_digits-n10", 0, 0.9, options)
    text = shown(options, tmp_path)
    assert text.count("no data") == text.count("not run") == 1
    assert text.splitlines()[-1] == "fedavg/emnist_digits-n10: get it there"
    assert "90.00  +0.99" in text


def test_there_is_no_gap_between_different_data(tmp_path, at_hand):
    options = Options("fedmn/table2", cells=("local",))
    there(tmp_path / "a", "local/cifar10", 0, 0.6, options)
    line = next(x for x in shown(options, tmp_path).splitlines() if x.startswith("local"))
    assert line.split() == ["local", "70.20", "60.00", "1", "too", "short", "to", "tell"]


def test_settings_on_the_command_line(tmp_path, at_hand):
    options = FULL._replace(changes=["lenet.batch_norm=false", "momentum=0.9"])
    text = " ".join(shown(options, tmp_path).split())
    assert "momentum 0.9 instead of 0.0" in text
    assert "lenet.batch_norm false instead of true" in text
    bad = FULL._replace(changes=["momentom=0.9"])
    assert "no setting momentom; did you mean momentum?" in message(shown, bad, tmp_path)
    text = " ".join(shown(FULL._replace(changes=["clip_norm=10.", "model=mlp"]), tmp_path).split())
    assert "clip_norm 10.0 instead of unset; model mlp instead of lenet" in text


# What is run.


@pytest.fixture
def ran(monkeypatch):
    """Runs that are only noted."""
    seen = []

    def run(config, where, stop):
        seen.append((config.algorithm, config.seed, where))
        if config.algorithm == "local":
            raise UsageError("no room\nfor this")

    monkeypatch.setattr(runner, "run", run)
    return seen


def test_what_is_missing_is_run_and_what_was_cut_goes_on(tmp_path, at_hand, ran, capsys):
    there(tmp_path / "a", "fedavg/cifar10-n10", 0, 0.6)
    cut = there(tmp_path / "b", "fedavg/cifar10-n10", 1, 0.6, finished=False)
    options = FULL._replace(out=tmp_path)
    assert reproduce.reproduce(options) == 0
    assert [one[:2] for one in ran] == [
        ("local", 0),
        ("per_fedavg", 0),
        ("local", 1),
        ("fedavg", 1),
        ("per_fedavg", 1),
    ]
    assert ran[3][2] == cut
    assert len({one[2] for one in ran}) == 5
    captured = capsys.readouterr()
    assert "6 runs: 1 exist, 1 are resumed, 4 are missing" in captured.err
    assert "local/cifar10-n10: no room for this" in captured.out
    assert "cannot be run" in captured.out
    text, page = ((tmp_path / f"pfedla-table1-full.{x}").read_text() for x in ("txt", "md"))
    assert text == captured.out
    assert "| local | 59.44 ± 0.40 | not run |" in page


def test_one_run_serves_all_of_its_cells(tmp_path, at_hand, ran):
    options = Options("pfedhn/table2", "full", ("fedavg/cifar10-*",), 1, out=tmp_path)
    reproduce.reproduce(options)
    assert len(ran) == 1
    message(
        reproduce.reproduce, options._replace(cells=("local/cifar10-n*",), table="pfedhn/table1")
    )
    assert len(ran) == 4


def test_a_run_that_cannot_be_is_said_of_all_of_its_cells(tmp_path, at_hand, ran, capsys):
    options = Options("fedmn/table2", cells=("local/*",), out=tmp_path / "new")
    assert message(reproduce.reproduce, options) == "no run finished: no room for this"
    assert not options.out.exists()
    assert len(ran) == 1
    assert capsys.readouterr().out.count("cannot be run") == 4


def test_only_show_runs_and_writes_nothing(tmp_path, at_hand, ran, capsys):
    assert reproduce.reproduce(FULL._replace(out=tmp_path, only_show=True)) == 0
    assert not ran
    assert not list(tmp_path.iterdir())
    assert "not run" in capsys.readouterr().out


def test_a_stop_shows_what_there_is(tmp_path, at_hand, monkeypatch, capsys):
    def run(config, where, stop):
        raise Stopped(7, 143)

    monkeypatch.setattr(runner, "run", run)
    assert reproduce.reproduce(FULL._replace(out=tmp_path)) == 143
    captured = capsys.readouterr()
    assert "stopped at round 7" in captured.err
    assert "not run" in captured.out


@pytest.mark.slow("a cell of a table, twice")
def test_a_real_cell_and_again(tmp_path, monkeypatch, capsys):
    options = Options("fedmn/table2", cells=("local/cifar10",), rounds=1, out=tmp_path)
    reproduce.reproduce(options)
    first = capsys.readouterr().out
    assert "not run" not in first
    monkeypatch.delattr(runner, "run")
    reproduce.reproduce(options)
    assert capsys.readouterr().out == first
    (path,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert path.name.startswith("fedmn-table2-local-cifar10-s0-")


# Names.


def test_tables_are_listed(capsys):
    assert reproduce.reproduce(Options("")) == 0
    whole = capsys.readouterr().out
    for name, table in TABLES.items():
        assert f"\n  {name} " in whole
        assert all(column in whole for column in table.columns)
    assert max(map(len, whole.splitlines())) <= 100
    line = message(reproduce.reproduce, Options("pfedla/tabel1"))
    assert line == "there is no table 'pfedla/tabel1'; did you mean pfedla/table1?"
    assert capsys.readouterr().out == ""


def test_names_of_cells(at_hand):
    def chosen(scale, *cells):
        return {
            f"{p.cell.row}/{p.cell.column}"
            for p in reproduce.plans(
                TABLES["pfedhn/table1"], Options("pfedhn/table1", scale, cells)
            )
        }

    assert len(chosen("full", "pfedhn")) == 7
    assert chosen("quick", "pfedhn") == {"pfedhn/cifar10-n10"}
    assert len(chosen("quick", "omniglot-n50")) == 8
    assert chosen("full", "local/*100-n50", "fedper/cifar10-n10") == {
        "local/cifar100-n50",
        "fedper/cifar10-n10",
    }
    line = message(chosen, "full", "omniglot")
    assert line == "no cell is 'omniglot'; did you mean omniglot-n50?"
    assert message(chosen, "full", "FedAvg/cifar10-n50").endswith("mean fedavg/cifar10-n50?")
