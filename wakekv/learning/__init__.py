"""Orders of pages that are learned from logs, and what no order could save."""
