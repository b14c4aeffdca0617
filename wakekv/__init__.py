"""wakekv: what heads read, and which pages a policy keeps for them. Nothing runs on import."""

__version__ = "0.1.0"
