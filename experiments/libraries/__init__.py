"""Comparisons with other libraries: speed (`benchmark`, `many_clients`) and agreement (`agree`).

`rivals.py` starts every outside program, as a child process with an adapter from `third_party/`.
"""
