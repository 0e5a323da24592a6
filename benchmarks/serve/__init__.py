"""The parts of the benchmark ``serving``."""
