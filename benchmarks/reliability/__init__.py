"""Faults made on purpose, and how a sweep ends under each: ``python -m benchmarks.reliability``."""
