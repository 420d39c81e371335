"""`reproduce`: its page of published and measured numbers, and its runs."""

import json

import pytest

from experiments import reproduce
from experiments.papers import cell_runs
from experiments.papers.tables import TABLES
from experiments.reproduce import Options
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import runner
from fedjax_pfl.runs.interrupt import Stopped
from fedjax_pfl.settings import configuration
from tests.commands import Flags, message
from tests.report.comparison_test import write_run as write_comparison_run

pytestmark = pytest.mark.slow("runs of a small table")

FULL = Options("pfedla/table1", "full", ("local/cifar10-n10", "*avg/cifar10-n10"), 2, rounds=60)


@pytest.fixture
def no_emnist(monkeypatch):
    """Makes all datasets available except EMNIST."""

    def require_available(name, data_dir=None):
        if name.startswith("emnist"):
            raise UsageError("get it there")

    monkeypatch.setattr(reproduce.data, "require_available", require_available)


def write_run(path, cell, seed, score, options=FULL, finished=True, **changes):
    """Writes a run directory of a cell."""
    plans = reproduce.plans(TABLES[options.table], options)
    (plan,) = [p for p in plans if f"{p.cell.row}/{p.cell.column}" == cell]
    config = plan.config.copy_and_resolve_references()
    config.update(seed=seed, partition_seed=seed, **changes)
    settings = json.loads(json.dumps(configuration.resolve(config)))
    return write_comparison_run(path, [score] * 3, settings, finished)


def page(options, out):
    table, seeds = TABLES[options.table], options.seeds or reproduce.SCALES[options.scale]
    runs = cell_runs.collect(reproduce.plans(table, options), seeds, out)
    return reproduce.page(options, table, runs, options.format)


def words_of(options, out):
    """Returns the page with single spaces."""
    return " ".join(page(options, out).split())


def test_the_page_shows_runs_by_their_settings(tmp_path, no_emnist):
    cell = "local/cifar10-n10"
    write_run(tmp_path / "a", cell, 0, 0.6, data_dir="elsewhere", chunk=3)
    write_run(tmp_path / "b", cell, 1, 0.7)
    write_run(tmp_path / "c", cell, 2, 0.1)  # a third seed
    write_run(tmp_path / "d", cell, 0, 0.1, learning_rate=0.5)
    write_run(tmp_path / "e", "fedavg/cifar10-n10", 1, 0.9, finished=False)
    diverged = write_run(tmp_path / "f", "per_fedavg/cifar10-n10", 0, 0.4) / "metrics.jsonl"
    diverged.write_text(diverged.read_text().replace('"before": {', '"before": {"not_finite": 1, '))
    assert page(FULL, tmp_path).splitlines()[6:] == [
        "cifar10-n10",
        "               published          ours    gap  seeds         after                 remark",
        "local       59.44 ± 0.40  65.00 ± 7.07  +5.56      2  70.00 ± 7.07      too short to tell",
        "fedavg      48.57 ± 0.63       not run                              seed 1 is at round 10",
        "per_fedavg  52.54 ± 1.79             -             1         45.00               diverged",
        "",
        "Not the published settings: rounds 60 instead of 600.",
    ]
    text = page(FULL._replace(format="markdown"), tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", "published", "ours", "gap", "seeds", "after", "remark"]
    assert cells[2][:5] == ["local", "59.44 ± 0.40", "65.00 ± 7.07", "+5.56", "2"]
    assert cells[3][:3] == ["fedavg", "48.57 ± 0.63", "not run"]


def test_the_full_page_has_all_cells(tmp_path, no_emnist):
    text = page(Options("pfedla/table1", "full"), tmp_path)
    assert text.count("not run") == 80  # ten rows, eight columns
    assert text.count("no BatchNorm in this network") == 4
    assert text.count("no data") == 18  # FedBN's two cells have another reason
    assert "The settings are the published ones" in text
    assert "18 cells: get it there" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_quick_page_lists_its_changes(tmp_path, no_emnist):
    text = page(Options("factorized_fl/table1"), tmp_path)
    assert text.count("not run") == 11
    papers, line, variants = text.partition("Variants of this library: --")
    assert line
    assert "\nbeta " in papers
    assert all(f"\n{row} " in variants for row in TABLES["factorized_fl/table1"].variants)
    flat = " ".join(text.split())
    assert "Left out: cifar10-iid, cifar10-permuted-iid, cifar10-noniid, cifar10-GB, svhn" in flat
    assert "dataset digits instead of cifar10" in flat
    assert "rounds 10 instead of 50" in flat
    assert "No gap is shown for runs on other data" in flat
    pfedla = words_of(Options("pfedla/table1"), tmp_path)
    assert "dataset digits" not in pfedla
    assert "rounds 4 instead of 600; classes.examples 100 instead of 200" in pfedla


def test_runs_on_missing_data_are_shown(tmp_path, no_emnist):
    options = FULL._replace(cells=("local/emnist_digits-n10", "fedavg/emnist_digits-n10"), seeds=1)
    write_run(tmp_path / "a", "local/emnist_digits-n10", 0, 0.9, options)
    text = page(options, tmp_path)
    assert text.count("no data") == text.count("not run") == 1
    assert text.splitlines()[-1] == "fedavg/emnist_digits-n10: get it there"
    assert "90.00  +0.99" in text


def test_runs_on_other_data_have_no_gap(tmp_path, no_emnist):
    options = Options("fedmn/table2", cells=("local",))
    write_run(tmp_path / "a", "local/cifar10", 0, 0.6, options)
    line = next(x for x in page(options, tmp_path).splitlines() if x.startswith("local"))
    assert line.split() == ["local", "70.20", "60.00", "1", "too", "short", "to", "tell"]


def test_changed_settings_are_listed(tmp_path, no_emnist):
    changes = ["lenet.batch_norm=false", "momentum=0.9", "clip_norm=10."]
    text = words_of(FULL._replace(changes=changes), tmp_path)
    assert "momentum 0.9 instead of 0.0" in text
    assert "lenet.batch_norm false instead of true" in text
    assert "clip_norm 10.0 instead of unset" in text
    unknown = FULL._replace(changes=["momentom=0.9"])
    assert "no setting momentom; did you mean momentum?" in message(page, unknown, tmp_path)


def test_settings_that_the_table_decides_are_refused(tmp_path, no_emnist):
    for change in ("seed=7", "partition_seed=9", "seeds=3", "own_partitions=true"):
        line = message(page, FULL._replace(changes=["momentum=0.9", change]), tmp_path)
        assert line.startswith(f"--set={change} is ignored: runs have seeds 0, 1, ..., ")
    line = message(page, FULL._replace(changes=["sweep=learning_rate=0.1,0.2"]), tmp_path)
    assert line == (
        "--set=sweep=learning_rate=0.1,0.2 is ignored: a cell has one run per seed; leave it out "
        "and give its values one at a time"
    )
    changes = ["evaluate_after=false", "validate_after=false"]
    for name in ("factorized_fl/table1", "pfedla/table1"):
        line = message(page, Options(name, changes=changes), tmp_path)
        assert line.startswith(f"{name} shows accuracy after local training, which ")
    assert "not run" in page(Options("fedmn/table2", changes=changes), tmp_path)


def test_settings_without_accuracy_are_refused(tmp_path, no_emnist):
    line = message(page, FULL._replace(changes=["metrics=macro_f1"]), tmp_path)
    assert line == (
        "tables and studies show accuracy, which metrics=macro_f1 leaves out; add accuracy, or "
        "leave this setting out"
    )
    line = message(page, FULL._replace(changes=["dataset=diabetes"]), tmp_path)
    assert line.startswith("tables and studies show accuracy, and 'diabetes' has none: ")
    for change in ("metrics=macro_f1, accuracy", "dataset=digits"):
        assert "not run" in page(FULL._replace(changes=[change]), tmp_path)


def test_the_labels_of_a_table_are_those_of_its_settings(tmp_path, no_emnist):
    """The file has no column of the default's name, and one of its columns has no classes."""
    path = tmp_path / "flats.csv"
    path.write_text("rooms,price,kind\n1,0.5,a\n2,0.75,b\n3,1.25,a\n4,1.5,b\n")

    def of_column(name):
        return FULL._replace(changes=[f"dataset=csv:{path}", f"csv.label={name}"])

    assert "not run" in page(of_column("kind"), tmp_path)
    assert "has none: its targets are real numbers" in message(page, of_column("price"), tmp_path)


@pytest.fixture
def runs(monkeypatch):
    """Records runs; those of Local fail."""
    calls = []

    def run_configs(configs, folder, stop):
        calls.extend((c.algorithm, c.seed, folder / name) for name, c in configs.items())
        if any(config.algorithm == "local" for config in configs.values()):
            raise UsageError("no room\nfor this")

    monkeypatch.setattr(runner, "run_configs", run_configs)
    return calls


def test_missing_runs_are_run_and_unfinished_ones_resumed(tmp_path, no_emnist, runs, capsys):
    write_run(tmp_path / "a", "fedavg/cifar10-n10", 0, 0.6)
    unfinished = write_run(tmp_path / "b", "fedavg/cifar10-n10", 1, 0.6, finished=False)
    assert reproduce.reproduce(FULL._replace(out=tmp_path)) == 0
    methods = ("local", 0), ("per_fedavg", 0), ("local", 1), ("fedavg", 1), ("per_fedavg", 1)
    assert [call[:2] for call in runs] == [*methods]
    assert runs[3][2] == unfinished
    assert len({directory for _, _, directory in runs}) == 5
    captured = capsys.readouterr()
    assert "6 runs: 1 exist, 1 are resumed, 4 are missing" in captured.err
    assert "local/cifar10-n10: no room for this" in captured.out
    assert "cannot be run" in captured.out
    text, markdown = ((tmp_path / f"pfedla-table1-full.{x}").read_text() for x in ("txt", "md"))
    assert text == captured.out
    assert "| local | 59.44 ± 0.40 | not run |" in markdown


def test_the_seeds_of_a_cell_are_one_program(tmp_path, no_emnist, monkeypatch):
    programs = []
    monkeypatch.setattr(runner, "run_configs", lambda configs, *_: programs.append(configs))
    write_run(tmp_path / "a", "fedavg/cifar10-n10", 0, 0.6)
    write_run(tmp_path / "sub/b", "local/cifar10-n10", 1, 0.6, finished=False)
    reproduce.reproduce(FULL._replace(out=tmp_path, one_program=True))
    seeds = [[(c.algorithm, c.seed, c.partition_seed) for c in p.values()] for p in programs]
    assert seeds == [
        [("local", 0, 0), ("local", 1, 1)],
        [("per_fedavg", 0, 0), ("per_fedavg", 1, 1)],
        [("fedavg", 1, 1)],
    ]
    assert list(programs[0])[1] == "sub/b"


def test_a_run_is_shared_by_its_cells(tmp_path, no_emnist, runs, capsys):
    options = Options("pfedhn/table2", "full", ("fedavg/cifar10-*",), 1, out=tmp_path)
    reproduce.reproduce(options)
    assert len(runs) == 1
    message(
        reproduce.reproduce, options._replace(cells=("local/cifar10-n*",), table="pfedhn/table1")
    )
    assert len(runs) == 4
    capsys.readouterr()
    options = Options("fedmn/table2", cells=("local/*",), out=tmp_path / "new")
    assert message(reproduce.reproduce, options) == "no run finished: no room for this"
    assert not options.out.exists()
    assert len(runs) == 5
    assert capsys.readouterr().out.count("cannot be run") == 4


@pytest.mark.parametrize(
    ("name", "given", "ignored"),
    [
        ("record", {"table": "pfedla/table1", "out": "runs"}, "table"),
        ("record", {"summary": True}, "summary"),
        ("summary", {"seeds": 5, "format": "markdown"}, "seeds"),
        ("summary", {"format": "markdown"}, None),
        ("record", {"out": "runs", "data_dir": "data"}, None),
    ],
)
def test_flags_of_single_tables_are_refused_for_all_tables(name, given, ignored):
    flag_values = Flags(**given | {name: True})
    if ignored is None:
        reproduce.refuse_ignored(flag_values)
    else:
        line = message(reproduce.refuse_ignored, flag_values)
        assert line == f"--{name} is for all tables and cells; leave --{ignored} out"


def test_reference_runs_are_refused(tmp_path, no_emnist, runs):
    options = FULL._replace(out=tmp_path, changes=["reference=true"])
    assert message(reproduce.reproduce, options).endswith("leave reference runs out")
    assert not runs


def test_only_show_runs_and_writes_nothing(tmp_path, no_emnist, runs, capsys):
    assert reproduce.reproduce(FULL._replace(out=tmp_path, only_show=True)) == 0
    assert not runs
    assert not list(tmp_path.iterdir())
    assert "not run" in capsys.readouterr().out


def test_the_page_is_shown_after_a_stop(tmp_path, no_emnist, monkeypatch, capsys):
    def run_configs(configs, folder, stop):
        raise Stopped(7, 143)

    monkeypatch.setattr(runner, "run_configs", run_configs)
    assert reproduce.reproduce(FULL._replace(out=tmp_path)) == 143
    captured = capsys.readouterr()
    assert "stopped at round 7" in captured.err
    assert "not run" in captured.out


@pytest.mark.slow("a cell of a table, twice")
def test_a_finished_cell_is_not_run_again(tmp_path, monkeypatch, capsys):
    options = Options("fedmn/table2", cells=("local/cifar10",), rounds=1, out=tmp_path)
    reproduce.reproduce(options)
    first = capsys.readouterr().out
    assert "not run" not in first
    monkeypatch.delattr(runner, "run_configs")
    reproduce.reproduce(options)
    assert capsys.readouterr().out == first
    (path,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert path.name.startswith("fedmn-table2-local-cifar10-s0-")


def test_tables_are_listed(capsys):
    assert reproduce.reproduce(Options("")) == 0
    text = capsys.readouterr().out
    for name, table in TABLES.items():
        assert f"\n  {name} " in text
        assert all(column in text for column in table.columns)
    assert max(map(len, text.splitlines())) <= 100
    line = message(reproduce.reproduce, Options("pfedla/tabel1"))
    assert line == "there is no table 'pfedla/tabel1'; did you mean pfedla/table1?"
    assert capsys.readouterr().out == ""


def test_cells_are_selected_by_patterns(no_emnist):
    def selected(scale, *cells):
        return {
            f"{p.cell.row}/{p.cell.column}"
            for p in reproduce.plans(
                TABLES["pfedhn/table1"], Options("pfedhn/table1", scale, cells)
            )
        }

    assert len(selected("full", "pfedhn")) == 7
    assert selected("quick", "pfedhn") == {"pfedhn/cifar10-n10"}
    assert selected("quick", "pfedhn*") == {"pfedhn/cifar10-n10", "pfedhn_pc/cifar10-n10"}
    assert len(selected("full", "*")) == 56
    assert len(selected("quick", "omniglot-n50")) == 8
    assert selected("full", "local/*100-n50", "fedper/cifar10-n10") == {
        "local/cifar100-n50",
        "fedper/cifar10-n10",
    }
    line = message(selected, "full", "omniglot")
    assert line == "no cell is 'omniglot'; did you mean omniglot-n50?"
    assert message(selected, "full", "FedAvg/cifar10-n50").endswith("mean fedavg/cifar10-n50?")
