"""What ``scheduler_cost`` is made of: one file a question."""
