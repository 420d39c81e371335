"""Personalised federated learning, compiled."""

from fedjax_pfl.data import arrays
from fedjax_pfl.runs.runner import Result, run, run_all

__all__ = ["Result", "arrays", "run", "run_all"]
