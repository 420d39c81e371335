"""The papers' tables of results, cell by cell: published numbers, and our settings for each."""

from experiments.papers.factorized_fl import tables as factorized_fl
from experiments.papers.fedmn import tables as fedmn
from experiments.papers.pfedhn import tables as pfedhn
from experiments.papers.pfedla import tables as pfedla
from experiments.papers.table import Cell, Table, cells_of

TABLES = {
    f"{module.__name__.split('.')[-2]}/{name}": table
    for module in (pfedla, pfedhn, fedmn, factorized_fl)
    for name, table in module.TABLES.items()
}

__all__ = ["TABLES", "Cell", "Table", "cells_of"]
