"""Configurations of the papers' experiments and of other methods, by name."""
