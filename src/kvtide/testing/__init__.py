"""Doubles for injecting faults and for deciding when things happen; shipped for authors of parts."""

from kvtide.testing.held import HeldDevice

__all__ = ["HeldDevice"]
