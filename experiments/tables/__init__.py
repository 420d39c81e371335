"""The papers' tables of results, cell by cell: published numbers, and our settings for each."""

from experiments.tables import factorized_fl, fedmn, pfedhn, pfedla
from experiments.tables.common import Cell, Table, cells_of

TABLES = {
    f"{module.__name__.rpartition('.')[2]}/{name}": table
    for module in (pfedla, pfedhn, fedmn, factorized_fl)
    for name, table in module.TABLES.items()
}

__all__ = ["TABLES", "Cell", "Table", "cells_of"]
