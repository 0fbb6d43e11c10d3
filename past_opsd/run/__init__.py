"""A run in its folder: the cycle, training, checkpoints, records, evaluation, what leaves it."""
