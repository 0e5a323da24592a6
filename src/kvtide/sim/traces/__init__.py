"""Traces of real servers, whatever wrote them, as requests of one type."""
