"""Tests of the papers' published numbers: checksums, and their use by tables and studies."""

import re

import pytest

from experiments.papers.factorized_fl import studies as factorized_fl
from experiments.papers.fedmn import studies as fedmn
from experiments.papers.pfedhn import studies as pfedhn
from experiments.papers.pfedla import studies as pfedla
from experiments.papers.table import PAPERS, published, readable
from experiments.papers.tables import TABLES
from fedjax_pfl.presets import fedmn as presets
from fedjax_pfl.settings import configuration

STUDIES = {"pfedla": pfedla, "pfedhn": pfedhn, "fedmn": fedmn, "factorized_fl": factorized_fl}


@pytest.mark.parametrize(
    ("name", "means", "deviations", "places"),
    [
        ("pfedla/table1", 5511.78, 55.17, 124590.61),
        ("pfedla/table2", 4913.17, 48.80, 106657.47),
        ("pfedla/table3", 3686.55, 0, 23958.64),
        ("pfedhn/table1", 3545.67, 90.14, 63744.58),
        ("pfedhn/table2", 1562.39, 52.75, 15406.25),
        ("pfedhn/table3", 1181.16, 1.98, 5932.01),
        ("pfedhn/table4", 263.26, 4.21, 520.88),
        ("fedmn/table2", 2228.70, 0, 26123.50),
        ("factorized_fl/table1", 9224.29, 161.89, 419150.48),
    ],
)
def test_published_tables_have_the_right_sums(name, means, deviations, places):
    """Checks the sum of means, of deviations, and of means times row times column."""
    table = TABLES[name]
    numbers = [
        (i * j, value if isinstance(value, list) else (value, 0))
        for i, cells in enumerate(table.cells.values(), 1)
        for j, column in enumerate(table.columns, 1)
        if (value := cells.get(column)) is not None
    ]
    assert sum(mean for _, (mean, _) in numbers) == pytest.approx(means, abs=1e-3)
    assert sum(std for _, (_, std) in numbers) == pytest.approx(deviations, abs=1e-3)
    assert sum(place * mean for place, (mean, _) in numbers) == pytest.approx(places, abs=1e-3)


def test_every_published_table_is_in_the_list():
    """Table 1 of FedMN describes datasets, so it has no cells to run."""
    assert {path.parent.name for path in PAPERS.glob("*/published.json")} == set(STUDIES)
    published_tables = {
        f"{p}/{key}" for p in STUDIES for key in published(p) if key.startswith("table")
    }
    assert published_tables - set(TABLES) == {"fedmn/table1"}
    assert set(TABLES) < published_tables


def test_fedmn_presets_match_the_published_datasets():
    for dataset, row in published("fedmn")["table1"].items():
        config = presets.get_config(dataset)
        assert config.clients == row["clients"]
        assert "x".join(map(str, config.fedmn.layout)) == row["layout"]
        assert {"cnn": "2-layer CNN", "mobilenet": "MobileNet-v2"}[config.model] in row["network"]


def test_pfedla_table3_repeats_cells_of_table1():
    """Accuracies for k = 0 and k = 1 are in table 1 too. Bytes are of 75 rounds."""
    first, third = TABLES["pfedla/table1"], TABLES["pfedla/table3"]
    for row, k in (("pfedla", "k=0"), ("heurpfedla", "k=1")):
        for table1_column, column in (
            ("emnist_digits-n10", "emnist_digits-accuracy"),
            ("cifar10-n10", "cifar10-accuracy"),
        ):
            assert third.cells[k][column] == first.cells[row][table1_column][0]
            dataset = first.dataset(table1_column)
            configs = [
                configuration.resolve(table.settings(a, b, dataset, None))
                for table, a, b in ((first, row, table1_column), (third, k, column))
            ]
            assert configs[0] == configs[1]
            assert third.settings(k, column.replace("accuracy", "MiB"), dataset, None).rounds == 75


@pytest.mark.parametrize(
    ("paper", "last", "without_figure"),
    [
        # One is a table, three are our own.
        ("pfedla", 7, {"retained", "rates", "compression", "calibration"}),
        ("pfedhn", 7, {"spectral"}),  # is a table
        ("fedmn", 2, {"paths", "grouping", "conflict", "gates"}),
        ("factorized_fl", 7, {"sparsity"}),  # is in an appendix
    ],
)
def test_every_published_figure_has_a_study(paper, last, without_figure):
    """Figures without numbers have no study. Values are a mean, or a mean with its deviation."""
    figures, studies = published(paper)["figures"], STUDIES[paper].STUDIES
    numbered = {int(number[0]) for name in figures if (number := re.match(r"\d+", name))}
    assert sorted(numbered) == list(range(1, last + 1))
    named_studies = {figure["study"] for figure in figures.values()} - {None}
    assert named_studies == set(studies) - without_figure
    for figure in figures.values():
        assert set(figure) <= {"shows", "study", "of", "values", "says", "layouts"}
        assert figure["shows"]
        if "values" in figure:
            assert figure["of"]
            for value in figure["values"].values():
                assert isinstance(value, float) or list(map(type, value)) == [float, float]
        if figure["study"] is None:
            assert set(figure) == {"shows", "study"}
    assert published(paper)["source"].endswith(
        ("figures 1 and 2",) if last == 2 else (f"figures 1 to {last}", "appendix C.5")
    )


def test_published_numbers_of_figures():
    depth = {"of": "cifar10-n50", "depth 3": 88.38, "depth 4": 88.42}
    assert readable("pfedhn", "figure6") == {"6": depth}
    assert readable("pfedhn", "fixed")["C.5"]["fixed"] == [83.92, 0.36]
    assert readable("factorized_fl", "single")["7j"]["factorised"] == 1.784
    assert readable("pfedhn", "figure5") == readable("pfedla", "compression") == {}
