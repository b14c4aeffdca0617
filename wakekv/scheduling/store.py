"""The slow tier of several requests: a page that equal prefixes share is stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np


class Store:
    """Which whole pages of prompts are stored, by all tokens up to their end, and who uses them.

    A page of keys and values depends on every token before it, so two prompts share pages as far as they begin alike
    (vLLM names its pages the same way). len(store): pages stored;  unshared: pages if each request stored its own.
    """

    def __init__(self, page_tokens: int = 16):
        self._page_tokens = page_tokens
        self._users: Counter[bytes] = Counter()
        self._pages: dict[Hashable, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, who: Hashable) -> bool:
        return who in self._pages

    @property
    def unshared(self) -> int:
        return sum(map(len, self._pages.values()))

    def add(self, who: Hashable, prompt: np.ndarray) -> int:
        """Store the prompt's whole pages for `who`; how many of them, from the first on, were there already."""
        tokens = np.ascontiguousarray(prompt, np.int32)
        ends = range(self._page_tokens, len(tokens) + 1, self._page_tokens)
        pages = [tokens[:end].tobytes() for end in ends]
        there = [page in self._users for page in pages]
        self._pages[who] = pages
        self._users.update(pages)
        return there.index(False) if False in there else len(there)

    def drop(self, who: Hashable) -> None:
        """`who` needs its pages no longer; those that nobody else uses are gone."""
        pages = self._pages.pop(who)
        self._users.subtract(pages)
        for page in pages:
            if not self._users[page]:
                del self._users[page]
