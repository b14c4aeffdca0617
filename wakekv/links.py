"""Links: how long pages take to come from the slow tier, by stated assumption or as measured on the spot."""

from __future__ import annotations

import time
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
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise InputError(f"link {self.name}: bandwidth must be above 0 and latency at least 0")

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
    """The link of this machine: pages gathered from host memory, to the GPU if torch has one, else within host memory.

    Batches of 1 to 256 pages are copied in turn for about `seconds_s`; latency and bandwidth are the line through the
    median time of each size.
    """
    sizes = [1, 4, 16, 64, 256]
    copy, where = _copier(page_bytes, 4096)
    spent: dict[int, list[float]] = {n: [] for n in sizes}
    stop = time.perf_counter() + seconds_s
    while time.perf_counter() < stop or len(spent[sizes[-1]]) < 5:
        for n in sizes:
            start = time.perf_counter()
            copy(n)
            spent[n].append(time.perf_counter() - start)
    median = np.array([np.median(spent[n]) for n in sizes])
    n_bytes = np.array(sizes) * float(page_bytes)
    slope = max(float(np.polyfit(n_bytes, median, 1, w=1.0 / median)[0]), 1e-13)  # by relative error
    latency = max(float(np.median(median - slope * n_bytes)), 0.0)
    return Link("measured", 1.0 / slope, latency, f"measured on the spot: {where}, pages of {page_bytes} bytes")


def _copier(page_bytes: int, n_pages: int):
    """(function that copies n random pages, words)"""
    rng = np.random.default_rng(0)
    try:
        import torch

        on_gpu = torch.cuda.is_available()
    except ModuleNotFoundError:
        on_gpu = False
    if on_gpu:
        slow = torch.zeros(n_pages, page_bytes, dtype=torch.uint8, pin_memory=True)
        fast = torch.zeros(n_pages, page_bytes, dtype=torch.uint8, device="cuda")

        def copy(n):
            fast[:n] = slow[torch.from_numpy(rng.integers(0, n_pages, n))].to("cuda", non_blocking=True)
            torch.cuda.synchronize()

        return copy, f"host memory to {torch.cuda.get_device_name()}"
    slow, fast = np.ones((n_pages, page_bytes), np.uint8), np.zeros((256, page_bytes), np.uint8)

    def copy(n):
        np.take(slow, rng.integers(0, n_pages, n), axis=0, out=fast[:n])

    return copy, "host memory to host memory, for want of a GPU"


def link(name: str, page_bytes: int) -> Link:
    """A link by its name in LINKS, or this machine's own: "measure". InputError for another name."""
    return measured(page_bytes) if name == "measure" else lookup(name, LINKS | {"measure": None}, "link")
