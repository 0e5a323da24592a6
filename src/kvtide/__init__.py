"""kvtide."""
