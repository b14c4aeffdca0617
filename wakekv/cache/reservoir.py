"""The slow tier of one layer: the exact bytes of every page that is full, whether it is also resident or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from wakekv.cache import loops
from wakekv.cache.mapped import mapped
from wakekv.errors import CacheError

TRIES = 3  # how often a read is tried before it is given up


class Reservoir:
    """Keys and values [row, page, token, d] in host memory (pinned where the fast tier is a GPU), or in a file.

    rows     sequences * KV heads;  n_pages: the most pages a row can have
    like     (keys, values): tensors of the fast tier, whose width, type and device pages have there
    folder   keep the bytes in a file in this folder, mapped into memory, and gone with the cache; None: in memory
    held     bool [row, page]: the pages that are here. A page that was destroyed is not.
    """

    def __init__(self, rows: int, n_pages: int, page: int, like: tuple[torch.Tensor, ...], folder: Path | None):
        self.device, self.folder = like[0].device, folder
        shapes = [(rows, n_pages, page, x.shape[-1]) for x in like]
        self.keys, self.values = (_room(shape, x, folder) for shape, x in zip(shapes, like, strict=True))
        self.held, self.views = torch.zeros(rows, n_pages, dtype=torch.bool), loops.Views()

    @property
    def where(self) -> str:
        """What this tier is, for every number that speaks of it."""
        if self.folder is not None:
            return "memory-mapped file"
        return "pinned host memory" if self.device.type == "cuda" else "host memory"

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Pages first, first + 1, ... of all rows, [row, page, token, d]; `rows` bool [row, page]: which are real."""
        last = first + keys.shape[1]
        self.keys[:, first:last] = keys.to(self.keys.device)
        self.values[:, first:last] = values.to(self.values.device)
        self.held[:, first:last] = rows.cpu()

    def read(self, rows: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, token, d] of n pages, on the device of the fast tier; int64 [n] each.

        Raises CacheError for a page that was destroyed, or where reading fails TRIES times.
        """
        return self._tried(rows.cpu(), pages.cpu())

    def move(self, rows: np.ndarray, pages: np.ndarray, slots: np.ndarray, into: tuple[np.ndarray, ...]) -> None:
        """The same bytes straight into slots of (keys, values) in host memory, as `loops.words` sees them; int64 [n]
        each. All of them or, where it raises, none."""
        self._tried(rows, pages, slots, into)

    def _tried(self, rows, pages, *where) -> tuple[torch.Tensor, ...] | None:
        held = (self.held if isinstance(rows, torch.Tensor) else self.views.of("held", self.held))[rows, pages]
        if not bool(held.all()):
            lost = int(pages[~held][0])
            raise CacheError(f"page {lost} was destroyed and cannot be fetched: a reversible policy keeps it")
        for attempt in range(TRIES):
            try:
                return self._get(rows, pages, *where)
            except OSError as error:
                if attempt == TRIES - 1:
                    raise CacheError(
                        f"{len(pages)} pages could not be fetched from the {self.where} ({error}): "
                        "the cache is as it was before this step, so the step can be taken again"
                    ) from error
        raise AssertionError("not reached")

    def _get(self, rows, pages, slots=None, into=None) -> tuple[torch.Tensor, ...] | None:
        if into is not None:
            loops.copy(self.views.of("keys", self.keys, loops.words), into[0], rows, pages, slots)
            loops.copy(self.views.of("values", self.values, loops.words), into[1], rows, pages, slots)
            return None
        flat = rows * self.keys.shape[1] + pages
        got = (x.flatten(0, 1).index_select(0, flat) for x in (self.keys, self.values))
        return tuple(x.to(self.device, non_blocking=True) for x in got)

    def block(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages first..last of all rows as tokens, [row, token, d], on the device of the fast tier."""
        return tuple(
            x[:, first:last].flatten(1, 2).to(self.device, non_blocking=True) for x in (self.keys, self.values)
        )

    def destroy(self, rows: torch.Tensor, pages: torch.Tensor) -> None:
        """Forget pages for good."""
        rows, pages = rows.cpu(), pages.cpu()
        self.keys[rows, pages], self.values[rows, pages] = 0, 0
        self.held[rows, pages] = False

    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of `index`, in its order."""
        index = index.cpu()
        self.keys, self.values = (self._moved(x, index) for x in (self.keys, self.values))
        self.held = self.held[index]

    def _moved(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        new = _room((len(index), *x.shape[1:]), torch.empty(0, dtype=x.dtype, device=self.device), self.folder)
        return new.copy_(x[index])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values."""
        return sum(x[0, 0].numel() * x.element_size() for x in (self.keys, self.values))


def _room(shape: tuple[int, ...], like: torch.Tensor, folder: Path | None) -> torch.Tensor:
    if folder is None:
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
    return mapped(shape, like.dtype, folder)
