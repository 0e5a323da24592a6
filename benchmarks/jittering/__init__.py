"""Parts of the benchmark ``jitter``: its load, the engine that is stepped, the control's plain copies."""
