"""Traces of real servers, whatever wrote them, as requests of one type."""

from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.reading import Trace, read_trace
from kvtide.sim.traces.request import TraceRequest

__all__ = ["Trace", "TraceOptions", "TraceRequest", "read_trace"]
