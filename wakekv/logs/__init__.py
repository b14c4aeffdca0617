"""Logs of what heads read: a generation on disk, what it asks of the cache, and how it is checked and shipped."""
