"""The parts of ``scripts/frozen_trial.py``."""
