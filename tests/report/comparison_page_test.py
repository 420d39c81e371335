"""Tests of comparisons as text, Markdown, LaTeX, CSV and a page."""

import csv
import io
import json

import pytest
from scipy.stats import wilcoxon

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import (
    comparison,
    comparison_curves,
    comparison_page,
    figures,
    html_page,
    text_tables,
)
from fedjax_pfl.report.numbers import metric_of
from tests.report import comparison_test
from tests.report.comparison_test import rows_of, settings, write_run

pair = comparison_test.pair  # the fixture


def test_text(pair):
    lines = comparison_page.text(pair).splitlines()
    assert lines[3:6] == [
        "              before         after    worst 10 %  MB down  MB up  rounds  seeds  gain %",
        "FedAvg  65.00 ± 7.07  70.00 ± 7.07  45.00 ± 7.07       20      5      10      2       0",
        "Local   75.00 ± 2.36  80.00 ± 2.36  60.00 ± 0.00       20      5      10      2       –",
    ]
    p = wilcoxon([0.2, 0.05, 0.05]).pvalue
    assert lines[-2:] == [
        "       before       p   after       p  clients",
        f"Local  +10.00  {p:.4f}  +10.00  {p:.4f}        3",
    ]


def test_variants_are_below_a_line_in_every_format(pair, monkeypatch):
    monkeypatch.setitem(METHODS, "local", METHODS["local"]._replace(variant_of=METHODS["fedavg"]))
    label = f"{METHODS['local'].title} (variant of this library)"
    rows = [pair[1]._replace(label=label), pair[0]]  # the variant comes first
    (results, tests) = comparison_page.tables(rows)
    assert [row[0] for row in results.rows] == ["FedAvg"]
    assert [row[0] for row in results.variants] == [label]
    assert tests.variants == []
    lines = comparison_page.text(rows).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Variants of this library: --"))
    assert lines[at - 1].startswith("FedAvg ")
    assert lines[at + 1].startswith("Local ")
    assert set(map(len, lines[at - 1 : at + 1])) == {len(lines[at])}
    markdown = comparison_page.markdown(rows)
    assert "|\n| Variants of this library: |  |  |  |  |  |  |  |  |\n| Local (variant" in markdown
    assert "\\midrule\nVariants of this library: \\\\\nLocal" in comparison_page.latex(rows)
    page = comparison_page._page(
        rows,
        comparison_page.tables(rows),
        comparison_curves.draw({}, metric_of(pair[0].runs[0].metrics)),
    )
    assert page.count('scope="rowgroup">Variants of this library:</th></tr>\n<tr><th') == 1


def test_text_has_at_most_100_columns(tmp_path):
    score = "negative_squared_error"
    for name, changes in (("a", {}), ("b", {"phases": [{"rounds": 10**6}] * 9})):
        for seed in (0, 1):
            path = tmp_path / f"{name}{seed}"
            write_run(
                path, [-1e30, -2e30], settings(seed=seed, **changes), seed == 0, score, (1, 10**6)
            )
    rows = rows_of(*(tmp_path / name for name in ("a0", "a1", "b0", "b1")))
    text = comparison_page.text(rows)
    assert max(map(len, text.splitlines())) <= 100
    assert "seed 1" in text
    assert "unfinished" in text


def test_markdown_parsed_back(pair):
    results, tests = comparison_page.tables(pair)
    lines = [x for x in comparison_page.markdown(pair).splitlines() if x.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", *results.heads]
    assert cells[2:4] == results.rows
    assert cells[4] == ["", *tests.heads]
    assert cells[6:] == tests.rows


def test_csv_parsed_back(pair):
    first, second = csv.DictReader(io.StringIO(comparison_page.as_csv(pair)))
    summary, test = comparison.summary(pair[1]), comparison.paired_test(pair[1], pair[0], "after")
    assert (first["label"], first["p_before"], first["paired_clients"]) == ("FedAvg", "", "")
    assert float(second["accuracy_before_std"]) == summary.before["std"]
    assert float(second["accuracy_worst10_mean"]) == summary.worst10["mean"]
    assert (float(second["difference_after"]), float(second["p_after"])) == test[:2]
    assert (second["rounds"], second["seeds"], second["paired_clients"]) == ("10", "2", "3")
    assert (float(second["megabytes_down"]), float(second["megabytes_up"])) == (20.0, 5.0)


TITLES = ("results", "paired_tests")


def test_files_and_a_self_contained_page(pair, tmp_path):
    hostile = [pair[0], pair[1]._replace(label="<script> $x_{$")]
    page = comparison_page.write(hostile, tmp_path / "new" / "out")
    tables = comparison_page.tables(hostile)
    names = {f"tables/{name}.{suffix}" for name in TITLES for suffix in ("csv", "tex", "md")}
    files = {p.relative_to(page.parent).as_posix() for p in page.parent.rglob("*") if p.is_file()}
    names |= {"compare.html", "compare.csv", "figures/curves.pdf", "figures/curves.png"}
    assert files == names
    for name, table in zip(TITLES, tables, strict=True):
        path = page.parent / "tables" / name
        assert path.with_suffix(".tex").read_text() == text_tables.latex([table]) + "\n"
        assert path.with_suffix(".md").read_text() == text_tables.markdown([table]) + "\n"
        rows = list(csv.reader(io.StringIO(path.with_suffix(".csv").read_text())))
        assert rows == [["", *table.heads], *table.all_rows]
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "http" not in text
    assert "<script" not in text
    assert ">65.00 ± 7.07</td>" in text
    assert "<dt>clients</dt><dd>3</dd>" in text
    assert "<dt>algorithm</dt>" not in text  # a differing setting
    assert f">{pair[1].runs[1].directory}</td>" in text


def test_curves_have_a_band_over_seeds_and_a_reproducible_pdf(pair):
    curves = {row.label: comparison.curve(row, metric_of(row.runs[0].metrics)) for row in pair}
    metric = metric_of(pair[0].runs[0].metrics)
    pictures = [comparison_curves.draw(curves, metric) for _ in range(2)]
    first, second = (html_page.pdf(picture.figure) for picture in pictures)
    assert first == second
    assert first.startswith(b"%PDF")
    band = pictures[0].figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (band.x0, band.x1) == (5, 10)
    assert (band.y0, band.y1) == (curves["FedAvg"].lowest[0], curves["FedAvg"].highest[1])
    assert pictures[0].caption.endswith("Bands reach from the lowest to the highest seed.")
    single = {"a": curves["FedAvg"]._replace(lowest=[0.3, 0.6], highest=[0.3, 0.6])}
    timed = {"timed": next(iter(curves.values()))._replace(seconds=[1.0, 2.0]), **curves}
    assert len(comparison_curves.draw(timed, metric).figure.axes) == 3
    single["no common round"] = figures.Curve([], [], [], [], [])
    assert "Bands" not in comparison_curves.draw(single, metric).caption


def test_a_dataset_whose_path_is_no_utf_8(pair, tmp_path):
    datasets = ({"dataset": "csv:a\udcff"}, {"dataset": "csv:b"})
    assert comparison.labels(datasets) == ["csv:a\\udcff", "csv:b"]


def test_a_directory_whose_name_is_no_utf_8(pair, tmp_path):
    run = pair[0].runs[0]._replace(directory=tmp_path / "r\udcff")
    page = comparison_page.write([pair[0]._replace(runs=[run])], tmp_path / "out")
    assert "r\\udcff" in page.read_text(encoding="utf-8")


def test_every_row_is_in_the_legend(pair):
    metric = metric_of(pair[0].runs[0].metrics)
    curve = comparison.curve(pair[0], metric)
    picture = comparison_curves.draw({"_mine": curve, "$a": curve}, metric)
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()] == ["_mine", r"\$a"]


def test_folder_that_cannot_be_written_is_refused(pair, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        comparison_page.write(pair, tmp_path / "file")


def test_diagnostics_are_columns(tmp_path):
    """The value is the mean over layers and seeds at the last evaluation: (3 + 1 + 4 + 2) / 4."""
    paths = [write_run(tmp_path / "fedavg", [0.4], settings(seed=0))]
    for seed, peers in enumerate(({"conv": 3.0, "head": 1.0}, {"conv": 4.0, "head": 2.0})):
        path = write_run(
            tmp_path / f"pfedla{seed}", [0.5], settings("pfedla", seed=seed), rounds=(5,)
        )
        line = json.loads((path / "metrics.jsonl").read_text())
        line["diagnostics"] = {"peers": peers, "one_hot": 0.0}
        (path / "metrics.jsonl").write_text(json.dumps(line))
        paths.append(path)
    fedavg, pfedla = rows_of(*paths)
    rows = [pfedla, fedavg]
    table = comparison_page.tables(rows)[-1]
    assert table.heads == ["peers", "one hot"]
    ((label, *cells),) = table.rows
    assert label.startswith("pFedLA")
    assert cells == ["2.5", "0"]
    lines = list(csv.DictReader(io.StringIO(comparison_page.as_csv(rows))))
    assert [line["diagnostic_peers"] for line in lines] == ["2.5", ""]
    assert "Diagnostics" in comparison_page.write(rows, tmp_path / "out").read_text()
    assert len(comparison_page.tables(rows[1:])) == 1


def test_epsilon_of_a_row_is_that_of_the_seed_with_most_rounds(tmp_path):
    """A seed that ended after five rounds has spent less than the other one after ten."""
    for seed, epsilon in ((0, 1.0), (1, 2.0)):
        path = write_run(
            tmp_path / f"{seed}", [0.5] * 3, settings(seed=seed), rounds=(5 + 5 * seed,)
        )
        line = json.loads((path / "metrics.jsonl").read_text())
        line |= {"epsilon": epsilon, "delta": 1e-5}
        (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    write_run(tmp_path / "local", [0.5] * 3, settings("local"))
    rows = rows_of(*(tmp_path / name for name in ("0", "1", "local")))
    assert "ε = 2, δ = 1e-05" in comparison_page.text(rows)
