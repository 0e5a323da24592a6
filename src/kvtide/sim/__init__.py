"""The production code on a recorded trace: traces in, hits and times to first token out."""
