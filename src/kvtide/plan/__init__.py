"""What a model needs and what a budget holds, worked out before anything is bought; no trace, no engine."""
