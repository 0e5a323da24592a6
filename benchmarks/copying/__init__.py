"""The parts of ``benchmarks/copies.py``: what is copied, what each arm does, and the process they run in."""
