"""The pictures, by what they show; figures.py lists them."""
