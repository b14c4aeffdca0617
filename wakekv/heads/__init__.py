"""What heads do: do they change their minds, when do they wake, and what could have foretold it."""
