"""What caches cost: answers, time and memory, and how long a page takes to come."""
