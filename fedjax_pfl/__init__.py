"""Personalised federated learning, compiled."""

from fedjax_pfl.data import arrays
from fedjax_pfl.runs.runner import Result, run, run_all

__version__ = "0.1.0"
__all__ = ["Result", "arrays", "run", "run_all"]
