"""Tests of the papers' tables: settings of every cell, and measures of runs."""

import pytest

from experiments import reproduce
from experiments.papers import table as common
from experiments.papers.tables import TABLES, cells_of
from experiments.reproduce import Options
from fedjax_pfl.report import run_reader
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration

pytestmark = pytest.mark.slow("presets of every table")


def test_format_of_cells():
    assert common.cell(None) == "-"
    assert common.cell([59.44, 0.4]) == "59.44 ± 0.40"
    assert common.cell({"mean": 1.0, "std": None, "seeds": 1}) == "1.00"
    assert common.cell("not run") == "not run"


# The settings of cells.


def first_row_and_column(name):
    """Returns the cells of the first row and of the first column."""
    cells = cells_of(TABLES[name])
    return [c for c in cells if c.row == cells[0].row or c.column == cells[0].column]


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_configuration_at_both_scales(name):
    table = TABLES[name]
    for cell in first_row_and_column(name):
        dataset = table.dataset(cell.column)
        full, quick = (
            table.settings(cell.row, cell.column, *arguments)
            for arguments in ((dataset, None), ("digits", table.quick.rounds))
        )
        configuration.specify(full)
        configuration.specify(quick)
        assert (full.dataset, quick.dataset) == (dataset, "digits")
        assert quick.clients <= 12
        table.measures(cell.column)


def settings(name, cell, **options):
    row, column = cell.split("/")
    table = TABLES[name]
    return table.settings(row, column, table.dataset(column), options.get("rounds"))


@pytest.mark.parametrize(
    ("name", "cell", "expected"),
    [
        ("pfedla/table1", "pfedla/cifar10-n10", {"rounds": 600, "clients_per_round": None}),
        ("pfedla/table1", "fedavg/cifar10-n100", {"rounds": 2500, "clients_per_round": 10}),
        ("pfedla/table1", "pfedme/cifar10-n10", {"local_epochs": None, "local_steps": 20}),
        ("pfedla/table2", "heurpfedla/emnist_digits-n10", {"dataset": "emnist_digits"}),
        ("pfedla/table3", "k=2/cifar10-MiB", {"rounds": 75, "clients": 10}),
        ("pfedhn/table1", "pfedhn/cifar100-n50", {"rounds": 5000, "clients_per_round": 1}),
        ("pfedhn/table1", "local/cifar10-n10", {"rounds": 40}),
        ("pfedhn/table2", "fedavg/cifar10-S", {"clients": 75, "clients_per_round": 15}),
        ("pfedhn/table3", "pfedme/mnist-n100", {"model": "mlp", "local_steps": 20}),
        ("fedmn/table2", "fedavg/cifar100", {"rounds": 200, "partition": "pachinko"}),
        ("factorized_fl/table1", "fedavg/cifar10-permuted-iid", {"rounds": 50, "keep_head": True}),
        ("factorized_fl/table1", "alpha/domains-food", {"rounds": 100, "clients": 20}),
    ],
)
def test_full_has_the_published_settings(name, cell, expected):
    config = settings(name, cell)
    assert {key: config[key] for key in expected} == expected


def test_parts_of_the_published_settings():
    assert settings("pfedla/table1", "pfedla/cifar100-n10").classes.per_client == 12
    assert settings("pfedla/table2", "pfedla/cifar100-n10").dominant.dominant == 6
    assert settings("pfedla/table3", "k=2/cifar10-MiB").pfedla.k == 2
    assert settings("pfedla/table1", "heurpfedla/cifar10-n10").pfedla.k == 1
    assert settings("factorized_fl/table1", "fedfomo/cifar10-iid").fedfomo.reference == "last"
    rows = TABLES["factorized_fl/table1"].variants
    for row, share in zip(rows, ("u", "all"), strict=True):
        config = settings("factorized_fl/table1", f"{row}/domains-food")
        assert (config.algorithm, config.factorized_fl_moved.share) == (
            "factorized_fl_moved",
            share,
        )
    assert settings("factorized_fl/table1", "beta/domains-food").algorithm == "factorized_fl"
    assert settings("pfedhn/table4", "pfedhn/cifar10-n10").pfedhn.spectral_norm
    first, second = settings("fedmn/table2", "fedmn/cifar10", rounds=60).phases
    assert (first["rounds"], second["rounds"]) == (29, 31)


@pytest.mark.parametrize(
    ("column", "dataset", "epochs"),
    [
        ("cifar10-n10", "cifar10", (5, 5)),
        ("cifar10-n100", "cifar10", (10, 10)),
        ("cifar10-n10", "digits", (2, 3)),
    ],
)
def test_fedrep_has_as_many_epochs_as_other_methods(column, dataset, epochs):
    """Head and body have half each of the paper's 10, or 20 with 100 clients, or 5 on digits."""
    table = TABLES["pfedla/table1"]
    fedavg, fedrep = (table.settings(row, column, dataset, None) for row in ("fedavg", "fedrep"))
    assert (fedrep.local_epochs, fedrep.fedrep.head_epochs) == epochs
    assert fedavg.local_epochs == sum(epochs)


def test_measures_on_worked_numbers():
    """Two of ten clients belong to a domain, and every third client to a size."""
    metrics = [
        {
            "round": r,
            "best_round": 5,
            "bytes_down": 10**9,
            "bytes_up": 5 * 10**8,
            "before": {"accuracy_mean": a},
            "after": {"accuracy_mean": 1.0},
        }
        for r, a in ((5, 0.75), (10, 0.5))
    ]
    clients = [
        {
            "client": f"{i}",
            "group": f"{i % 3}",
            "before_accuracy": f"{i / 10}",
            "after_accuracy": f"{i / 10 + 0.05}",
            "best_before_accuracy": "" if i == 1 else 0.0,
        }
        for i in range(10)
    ]
    run = run_reader.Run(None, {}, metrics, clients)

    def measured(name, column):
        return [m(run) for m in TABLES[name].measures(column) if m]

    assert measured("pfedla/table1", "cifar10-n10") == [50, 100]
    assert measured("pfedla/table3", "cifar10-MiB") == [1.5e9 / 2**20]
    assert measured("pfedhn/table1", "cifar10-n10") == [75, 50]
    assert measured("pfedhn/table2", "cifar10-M") == pytest.approx([10 / 3, 40])  # 1, 4, 7
    assert measured("factorized_fl/table1", "cifar10-iid") == [100, 50]
    assert measured("factorized_fl/table1", "domains-food") == pytest.approx([30, 25])  # 2, 3
    assert measured("factorized_fl/table1", "domains-GB") == [1.5]


def test_quick_scale_runs_on_digits(monkeypatch):
    """Builds the first row of each table without training."""
    monkeypatch.setenv("TFDS_DATA_DIR", "/nowhere")
    for name, table in TABLES.items():
        first = next(iter(table.cells))
        (config, *_) = [p.config for p in reproduce.plans(table, Options(name, cells=(first,)))]
        assert build(config).federation.clients <= 12
