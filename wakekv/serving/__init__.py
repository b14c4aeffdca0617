"""What the pages cost in a serving engine, and what engines are asked."""
