"""The parts of ``benchmarks/disk.py``: what each arm does, and the process in which they take turns."""
