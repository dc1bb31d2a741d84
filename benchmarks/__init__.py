"""Measurements of dpexp against references, run by hand: ``python -m benchmarks.<name>``.

Each prints a table of ratios. A pair (dpexp, reference) is measured in turns within one run, each
in a process of its own, and the medians are compared; see the README in this folder.
"""
