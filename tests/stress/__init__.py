"""Long tries of what must not break a run; `python -m tests.stress` runs all of them.

pytest collects none of these; tests/stress_test.py makes a small pass of each.
"""
