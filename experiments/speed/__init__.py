"""The parts of `python -m experiments.benchmark`."""
