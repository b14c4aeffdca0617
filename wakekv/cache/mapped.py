"""Room for pages in a file that has no name: nothing is left behind when its mapping goes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from wakekv.files import writable


def mapped(shape: Sequence[int], dtype: torch.dtype, folder: str | Path) -> torch.Tensor:
    """A tensor of zeros in a file in `folder`, which is made if need be, mapped into memory.

    InputError where no file can be made there or the disk has no room for it: a full one would end the process later.
    """
    n = torch.Size(shape).numel()
    n_bytes = max(1, n * dtype.itemsize)
    folder = writable(folder, n_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".pages", dir=folder)
    try:
        os.ftruncate(handle, n_bytes)
        return torch.from_file(name, shared=True, size=n, dtype=dtype).view(shape)
    finally:
        os.close(handle)
        os.unlink(name)
