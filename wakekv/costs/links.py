"""Links: how long pages take to come from the slow tier, by stated assumption or as measured on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wakekv.errors import InputError, lookup


@dataclass(frozen=True)
class Link:
    """What brings a page from the slow tier: bytes a second of a batch of copies, seconds before its first byte."""

    name: str
    bytes_per_s: float
    latency_s: float
    about: str

    def __post_init__(self):
        numbers = all(isinstance(x, int | float | np.number) for x in (self.bytes_per_s, self.latency_s))
        if not (numbers and self.bytes_per_s > 0 and 0 <= self.latency_s < np.inf):
            raise InputError(f"link {self.name}: bandwidth must be a number above 0 and latency one from 0 up")

    def seconds(self, n_bytes, batches):
        """How long it takes to bring `n_bytes` in `batches` batches."""
        return np.asarray(n_bytes) / self.bytes_per_s + np.asarray(batches) * self.latency_s


_SLOT = "assumed: 16 lanes, pinned memory, about four fifths of the nominal rate, one launch a layer"
LINKS = {
    "pcie3": Link("pcie3", 12e9, 20e-6, _SLOT),
    "pcie4": Link("pcie4", 25e9, 20e-6, _SLOT),
    "pcie5": Link("pcie5", 50e9, 20e-6, _SLOT),
    "c2c": Link("c2c", 350e9, 10e-6, "assumed: host memory over a coherent chip-to-chip link"),
    "nvme": Link("nvme", 6e9, 100e-6, "assumed: one PCIe 4 drive, deep queue, reads of a page and more"),
}


def measured(page_bytes: int, *, seconds_s: float = 0.5) -> Link:
    """The link of this machine, as a cache has it: pages from host memory into a pool, on the GPU if torch has one.

    Batches of 1 to 256 pages are brought in turn for about `seconds_s`, each as a layer brings what it misses; latency
    and bandwidth are the line through the median time of each size. Needs torch.
    """
    sizes = [1, 4, 16, 64, 256]
    bring, where = _bringer(page_bytes, 4096)
    spent: dict[int, list[float]] = {n: [] for n in sizes}
    stop = time.perf_counter() + seconds_s
    while time.perf_counter() < stop or len(spent[sizes[-1]]) < 5:
        for n in sizes:
            spent[n].append(bring(n))
    median = np.array([np.median(spent[n]) for n in sizes])
    n_bytes = np.array(sizes) * float(page_bytes)
    slope = max(float(np.polyfit(n_bytes, median, 1, w=1.0 / median)[0]), 1e-13)  # by relative error
    latency = max(float(np.median(median - slope * n_bytes)), 0.0)
    return Link("measured", 1.0 / slope, latency, f"measured on the spot: {where}, pages of {page_bytes} bytes")


def _bringer(page_bytes: int, n_pages: int) -> tuple[Callable[[int], float], str]:
    """(function that brings n random pages and says how many seconds it took, where from and to)"""
    import torch  # here, as a link by its name needs none of it

    from wakekv.cache.books import Books
    from wakekv.cache.reservoir import Reservoir
    from wakekv.cache.shared import Shared, Store

    rng, on_gpu = np.random.default_rng(0), torch.cuda.is_available()
    like = (torch.zeros(1, 1, page_bytes // 2, dtype=torch.uint8, device="cuda" if on_gpu else "cpu"),) * 2
    slow, fast = Reservoir(1, n_pages, 1, like, None), Shared(Store(1, n_pages, like), 0, like)
    slow.write(0, *(x.expand(1, n_pages, 1, -1) for x in like), torch.ones(1, n_pages, dtype=torch.bool))
    fast.store.room(512)

    def bring(n: int) -> float:
        pages, books = torch.from_numpy(rng.choice(n_pages, n, replace=False)), Books(like[0].device)
        with books.timing("stall_s"):
            fast.bring(slow, torch.zeros_like(pages), pages)
        fast.restore((torch.full_like(fast.slot_of, -1),))
        return books.stall_s

    return bring, f"host memory to {torch.cuda.get_device_name() if on_gpu else 'host memory, for want of a GPU'}"


def link(name: str, page_bytes: int) -> Link:
    """A link by its name in LINKS, or this machine's own: "measure". InputError for another name."""
    return measured(page_bytes) if name == "measure" else lookup(name, LINKS | {"measure": None}, "link")
