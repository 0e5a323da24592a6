"""Benchmarks: one file each beside ``run.py``; what they share is in ``frame``."""
