"""Leakage audit of a finished run: what an honest-but-curious server learns from uploads."""

from fedjax_pfl.audit.report import audit, draw, tables

__all__ = ["audit", "draw", "tables"]
