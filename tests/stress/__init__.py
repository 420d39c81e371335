"""Long robustness campaigns; `python -m tests.stress` runs all of them.

tests/stress_test.py runs a small part of each.
"""
