"""A run: which logs, which notebooks, in which order, what came out and whether it still holds."""
