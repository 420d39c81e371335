"""Commands: one module per system, each run with `python -m experiments.NAME`."""
