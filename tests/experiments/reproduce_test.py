"""The papers' numbers, the settings of every cell, and the page that stands them beside ours."""

import json

import pytest

from experiments import reproduce
from experiments.papers import table as common
from experiments.papers.factorized_fl import tables as factorized_fl
from experiments.papers.pfedhn import tables as pfedhn
from experiments.papers.pfedla import tables as pfedla
from experiments.papers.tables import TABLES, cells_of
from experiments.reproduce import Options
from fedjax_pfl.config import configuration
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import run_reader
from fedjax_pfl.runs import runner
from fedjax_pfl.runs.build import build
from fedjax_pfl.runs.interrupt import Stopped
from tests.experiments.launch_test import message
from tests.report.comparison_test import made

# Published numbers.


def test_cells():
    assert common.cell(None) == "-"
    assert common.cell([59.44, 0.4]) == "59.44 ± 0.40"
    assert common.cell({"mean": 1.0, "std": None, "seeds": 1}) == "1.00"
    assert common.cell("not run") == "not run"


def test_published_tables_are_whole():
    """Ten rows; FedBN has no number where the network has no BatchNorm."""
    published = pfedla.PUBLISHED
    for table in ("table1", "table2"):
        rows = published[table]["rows"]
        assert len(rows) == 10
        for method, cells in rows.items():
            missing = {cell for cell, value in cells.items() if value is None}
            without = {f"{d}-n{n}" for d in ("emnist", "fashion_mnist") for n in (10, 100)}
            assert missing == (without if method == "fedbn" else set())
    assert published["table1"]["rows"]["pfedla"]["cifar10-n10"] == [61.43, 0.56]
    assert published["table2"]["rows"]["heurpfedla"]["cifar100-n100"] == [48.72, 1.75]


def test_pfedhns_published_tables_are_whole():
    """Eight rows and seven columns; each cell has a mean and a deviation."""
    published = pfedhn.PUBLISHED
    for table, rows, columns in (("table1", 8, 7), ("table2", 5, 6), ("table3", 4, 3)):
        found = published[table]["rows"]
        assert len(found) == rows
        for cells in found.values():
            assert len(cells) == columns
            assert all(len(cell) == 2 for cell in cells.values())
    assert published["table1"]["rows"]["pfedhn_pc"]["omniglot-n50"] == [81.89, 0.15]
    assert published["table2"]["rows"]["pfedhn"]["cifar100-L"] == [50.66, 2.7]


def test_factorized_fls_published_table_is_whole():
    """The cell of another dataset is none."""
    tables = factorized_fl.PUBLISHED["table1"]
    assert {name: len(rows) for name, rows in tables.items()} == {
        "cifar10": 9, "svhn_cropped": 9, "domains": 9
    }  # fmt: skip
    assert set(tables["cifar10"]) == set(factorized_fl.ROWS)
    for rows in tables.values():
        for cells in rows.values():
            values = [v for name, v in cells.items() if name != "gigabytes"]
            assert all(len(v) == 2 for v in values)
    assert tables["cifar10"]["beta"]["permuted-noniid"] == [56.61, 1.1]
    assert tables["domains"]["alpha"]["average"] == [64.49, 1.57]


# The settings of cells.


def everything(name):
    """The first column in every row, and every column in the first row."""
    cells = cells_of(TABLES[name])
    return [c for c in cells if c.row == cells[0].row or c.column == cells[0].column]


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_configuration_at_both_scales(name):
    table = TABLES[name]
    for cell in everything(name):
        own = table.dataset(cell.column)
        full, quick = (
            table.settings(cell.row, cell.column, *given)
            for given in ((own, None), ("digits", table.quick.rounds))
        )
        configuration.specify(full)
        configuration.specify(quick)
        assert (full.dataset, quick.dataset) == (own, "digits")
        assert quick.clients <= 12
        table.measures(cell.column)


def settings(name, cell, **given):
    row, column = cell.split("/")
    table = TABLES[name]
    return table.settings(row, column, table.dataset(column), given.get("rounds"))


@pytest.mark.parametrize(
    ("name", "cell", "wanted"),
    [
        ("pfedla/table1", "pfedla/cifar10-n10", {"rounds": 600, "clients_per_round": None}),
        ("pfedla/table1", "fedavg/cifar10-n100", {"rounds": 2500, "clients_per_round": 10}),
        ("pfedla/table1", "pfedme/cifar10-n10", {"local_epochs": None, "local_steps": 20}),
        ("pfedla/table2", "heurpfedla/emnist-n10", {"dataset": "emnist_digits"}),
        ("pfedla/table3", "k=2/cifar10-MiB", {"rounds": 75, "clients": 10}),
        ("pfedhn/table1", "pfedhn/cifar100-n50", {"rounds": 5000, "clients_per_round": 1}),
        ("pfedhn/table1", "local/cifar10-n10", {"rounds": 40}),
        ("pfedhn/table2", "fedavg/cifar10-S", {"clients": 75, "clients_per_round": 15}),
        ("pfedhn/table3", "pfedme/mnist-n100", {"model": "mlp", "local_steps": 20}),
        ("fedmn/table2", "fedavg/cifar100", {"rounds": 200, "partition": "pachinko"}),
        ("factorized_fl/table1", "beta/cifar10-permuted-iid", {"rounds": 50, "keep_head": True}),
        ("factorized_fl/table1", "alpha/domains-food", {"rounds": 100, "clients": 20}),
    ],
)
def test_full_has_the_published_settings(name, cell, wanted):
    config = settings(name, cell)
    assert {key: config[key] for key in wanted} == wanted


def test_parts_of_the_published_settings():
    assert settings("pfedla/table1", "pfedla/cifar100-n10").classes.per_client == 12
    assert settings("pfedla/table2", "pfedla/cifar100-n10").dominant.dominant == 6
    assert settings("pfedla/table3", "k=2/cifar10-MiB").pfedla.k == 2
    assert settings("pfedla/table1", "heurpfedla/cifar10-n10").pfedla.k == 1
    assert settings("factorized_fl/table1", "fedfomo/cifar10-iid").fedfomo.reference == "last"
    assert settings("pfedhn/table4", "pfedhn/cifar10-n10").pfedhn.spectral_norm
    fedrep = settings("pfedla/table1", "fedrep/cifar10-n10")
    assert fedrep.local_epochs + fedrep.fedrep.head_epochs == 10
    first, second = settings("fedmn/table2", "fedmn/cifar10", rounds=60).phases
    assert (first["rounds"], second["rounds"]) == (20, 40)


def test_measures_by_hand():
    """A fifth of ten clients is a domain, and a third of them a size."""
    metrics = [{"round": r, "best_round": 5, "bytes_down": 10**9, "bytes_up": 5 * 10**8,
                "before": {"accuracy_mean": a}, "after": {"accuracy_mean": 1.0}}
               for r, a in ((5, 0.75), (10, 0.5))]  # fmt: skip
    clients = [{"client": f"{i}", "group": f"{i % 3}", "before_accuracy": f"{i / 10}",
                "after_accuracy": f"{i / 10 + 0.05}", "best_before_accuracy": "" if i == 1 else 0.0}
               for i in range(10)]  # fmt: skip
    run = run_reader.Run(None, {}, metrics, clients)
    ours = lambda name, column: [m(run) for m in TABLES[name].measures(column) if m]
    assert ours("pfedla/table1", "cifar10-n10") == [50, 100]
    assert ours("pfedla/table3", "cifar10-MiB") == [1.5e9 / 2**20]
    assert ours("pfedhn/table1", "cifar10-n10") == [75, 50]
    assert ours("pfedhn/table2", "cifar10-M") == pytest.approx([10 / 3, 40])  # 1, 4, 7
    assert ours("factorized_fl/table1", "cifar10-iid") == [100, 50]
    assert ours("factorized_fl/table1", "domains-food") == pytest.approx([30, 25])  # 2, 3
    assert ours("factorized_fl/table1", "domains-GB") == [1.5]


def test_quick_fits_the_digits(monkeypatch):
    """Each table's first row, as far as compilation."""
    monkeypatch.setenv("TFDS_DATA_DIR", "/nowhere")
    for name, table in TABLES.items():
        first = next(iter(table.cells))
        (config, *_) = [p.config for p in reproduce.plans(table, Options(name, cells=(first,)))]
        assert build(config).federation.clients <= 12


# The page.

FULL = Options("pfedla/table1", "full", ("local/cifar10-n10", "*avg/cifar10-n10"), 2, rounds=60)


@pytest.fixture
def at_hand(monkeypatch):
    """All data but EMNIST's."""

    def need(name, data_dir=None):
        if name.startswith("emnist"):
            raise UsageError("get it there")

    monkeypatch.setattr(reproduce.data, "need", need)


def there(path, cell, seed, score, options=FULL, finished=True, **given):
    """A made-up run of a cell."""
    (one,) = [p for p in reproduce.plans(TABLES[options.table], options)
              if f"{p.cell.row}/{p.cell.column}" == cell]  # fmt: skip
    config = one.config.copy_and_resolve_references()
    config.update(seed=seed, **given)
    plain = json.loads(json.dumps(configuration.resolved(config)))
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
        "Not the published settings: rounds 60 in place of 600.",
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
    assert text.count("not run") == 80
    assert text.count("no BatchNorm in this network") == 4
    assert text.count("no data") == 18  # FedBN's two cells have another reason
    assert "The settings are the published ones" in text
    assert "18 cells: get it there" in text
    assert max(map(len, text.splitlines())) <= 100


def test_quick_says_what_it_leaves_out(tmp_path, at_hand):
    text = shown(Options("factorized_fl/table1"), tmp_path)
    assert text.count("not run") == 9
    said = " ".join(text.split())
    assert "Left out: cifar10-iid, cifar10-permuted-iid, cifar10-noniid, cifar10-GB, svhn" in said
    assert "dataset digits in place of cifar10" in said
    assert "rounds 10 in place of 50" in said
    assert "There is no gap where other data stand in" in said
    own = " ".join(shown(Options("pfedla/table1"), tmp_path).split())
    assert "dataset digits" not in own
    assert "rounds 4 in place of 600; classes.examples 100 in place of 600" in own


def test_runs_are_shown_where_their_data_are_not_at_hand(tmp_path, at_hand):
    options = FULL._replace(cells=("local/emnist-n10", "fedavg/emnist-n10"), seeds=1)
    there(tmp_path / "a", "local/emnist-n10", 0, 0.9, options)
    text = shown(options, tmp_path)
    assert text.count("no data") == text.count("not run") == 1
    assert text.splitlines()[-1] == "fedavg/emnist-n10: get it there"
    assert "90.00  +0.99" in text


def test_there_is_no_gap_between_different_data(tmp_path, at_hand):
    options = Options("fedmn/table2", cells=("local",))
    there(tmp_path / "a", "local/cifar10", 0, 0.6, options)
    line = next(x for x in shown(options, tmp_path).splitlines() if x.startswith("local"))
    assert line.split() == ["local", "70.20", "60.00", "1", "too", "short", "to", "tell"]


def test_settings_on_the_command_line(tmp_path, at_hand):
    options = FULL._replace(changes=["lenet.batch_norm=false", "momentum=0.9"])
    text = shown(options, tmp_path)
    assert "momentum 0.9 in place of 0.0" in text
    assert "lenet.batch_norm false in place of true" in text
    bad = FULL._replace(changes=["momentom=0.9"])
    assert "no setting momentom; did you mean momentum?" in message(shown, bad, tmp_path)
    text = shown(FULL._replace(changes=["clip_norm=10.", "model=mlp"]), tmp_path)
    assert "clip_norm 10.0 in place of unset; model mlp in place of lenet" in text


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
        ("local", 0), ("per_fedavg", 0), ("local", 1), ("fedavg", 1), ("per_fedavg", 1)
    ]  # fmt: skip
    assert ran[3][2] == cut
    assert len({one[2] for one in ran}) == 5
    captured = capsys.readouterr()
    assert "6 runs: 1 are there, 1 go on, 4 are missing" in captured.err
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
    assert message(reproduce.reproduce, options) == "no run came to its end: no room for this"
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


def test_table_without_a_value():
    given = ["reproduce", "--table", "--scale=full"]
    assert reproduce._without_value(given) == ["reproduce", "--table=", "--scale=full"]
    assert reproduce._without_value(["reproduce", "--table"]) == ["reproduce", "--table="]
    named = ["reproduce", "--table", "fedmn/table2"]
    assert reproduce._without_value(named) == named


def test_names_of_cells(at_hand):
    chosen = lambda scale, *cells: {
        f"{p.cell.row}/{p.cell.column}"
        for p in reproduce.plans(TABLES["pfedhn/table1"], Options("pfedhn/table1", scale, cells))
    }
    assert len(chosen("full", "pfedhn")) == 7
    assert chosen("quick", "pfedhn") == {"pfedhn/cifar10-n10"}
    assert len(chosen("quick", "omniglot-n50")) == 8
    assert chosen("full", "local/*100-n50", "fedper/cifar10-n10") == {
        "local/cifar100-n50", "fedper/cifar10-n10"
    }  # fmt: skip
    line = message(chosen, "full", "omniglot")
    assert line == "no cell is 'omniglot'; did you mean omniglot-n50?"
    assert message(chosen, "full", "FedAvg/cifar10-n50").endswith("mean fedavg/cifar10-n50?")
