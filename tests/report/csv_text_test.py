"""Tests of CSV files: text is escaped, numbers are unchanged."""

import csv

from fedjax_pfl.report import csv_text, run_reader
from fedjax_pfl.report.csv_text import escaped, unescaped
from fedjax_pfl.runs import run_directory


def test_formulas_are_escaped_and_other_cells_unchanged():
    for text in ("=cmd|' /C calc'!A0", "+x", "-x", "@sum", "\t=1", "\r=1", "'=1"):
        assert escaped(text) == f"'{text}"
        assert unescaped(escaped(text)) == text
    for value in ("Bern", "'s-Gravenhage", "-5", "+1.5e3", "", -5, 0.25, None):
        assert escaped(value) == value
        assert unescaped(str(value)) == str(value)


def test_owners_in_clients_csv_are_read_back(tmp_path):
    names = ["=1+1", "Bern", "'=1", "-x"]
    rows = [{"client": i, "owner": name, "loss": -0.5} for i, name in enumerate(names)]
    run_directory.write_clients(tmp_path, rows)
    with (tmp_path / "clients.csv").open(newline="") as file:
        _, first, *_ = csv.reader(file)
    assert first == ["0", "'=1+1", "-0.5"]
    assert run_reader._clients(tmp_path / "clients.csv") == rows


def test_header_has_the_columns_of_all_rows():
    assert csv_text.text([{"a": "@x"}, {"b": -1}]) == "a,b\n'@x,\n,-1\n"
