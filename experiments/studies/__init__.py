"""Figures and tables of the papers, one module per system: `python -m experiments.studies.NAME`."""
