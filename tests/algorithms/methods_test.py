"""The table of methods agrees with their docstrings."""

import inspect
import re

import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms import METHODS, Method


def test_the_table_has_every_exported_factory():
    exported = {
        name: member
        for name, member in vars(algorithms).items()
        if inspect.isfunction(member) and name in algorithms.__all__
    }
    assert {name: method.factory for name, method in METHODS.items()} == exported


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.variant_of is None])
def test_title_and_paper_are_in_the_docstring(name):
    method = METHODS[name]
    title, paper = method.title, method.paper
    text = " ".join((inspect.getdoc(inspect.getmodule(method.factory)) or "").split())
    assert re.search(rf"(?<![\w-]){re.escape(title)}(?![\w+-])", text)
    if name == "local":
        assert paper == ""
        return
    authors, year = paper.rsplit(" ", 1)
    first = re.search(rf"{authors.replace(' et al.', '')}.*?\b((19|20)\d\d)\b", text)
    assert first, paper
    assert first[1] == year


def test_titles_and_variants():
    assert len({method.title for method in METHODS.values()}) == len(METHODS)
    for method in METHODS.values():
        if method.variant_of is not None:
            assert method.variant_of.variant_of is None
            assert method.variant_of.paper == method.paper


def test_labels():
    assert METHODS["pfedla"].label == "pFedLA, the method of Ma et al. 2022"
    assert METHODS["pfedla"].row == METHODS["pfedla"].title == "pFedLA"
    assert METHODS["local"].label == "Local"
    fedmn = METHODS["fedmn"]
    variant = Method(fedmn.factory, "FedMN-correlation", "Wang et al. 2022", variant_of=fedmn)
    assert variant.label == "FedMN-correlation, variant of this library (of FedMN)"
    assert variant.row == "FedMN-correlation (variant of this library)"
