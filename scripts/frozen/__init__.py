"""The parts of ``scripts/frozen_disk.py``."""
