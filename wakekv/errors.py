"""What can go wrong, as one line a reader can act on. Every error of ours is a WakeKVError."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

V = TypeVar("V")


class WakeKVError(Exception):
    """Anything wakekv refuses, in one line that names the input and the way out."""


class InputError(WakeKVError, ValueError):
    """An argument, file or name that a caller gave and can change."""


class TraceError(WakeKVError):
    """A recorded log that is missing, incomplete, damaged or not a log."""


class ModelError(WakeKVError):
    """A model that cannot be fetched, loaded or logged."""


class CacheError(WakeKVError):
    """A cache that cannot do what a model or a caller asks of it, or cannot get a page back."""


def lookup(name: str, table: Mapping[str, V], kind: str) -> V:
    """`table[name]`, or an InputError that lists the nearest known names of this `kind`."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(table)}"
    raise InputError(f"unknown {kind} {name!r}: {hint}")
