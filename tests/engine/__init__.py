"""Tests that start a real vLLM engine or server."""
