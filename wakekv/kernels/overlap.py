"""What a head wants more than once: at one step and the step before, or twice at one."""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True, error_model="numpy")
def adjacent_common(ptr, page, n_pages, common):
    """common int64 [head, step - 1]: pages wanted at step t and at t + 1."""
    last = np.empty(n_pages, np.int32)
    for h in range(ptr.shape[0]):
        last[:] = -2
        for t in range(ptr.shape[1] - 1):
            both = 0
            for i in range(np.uint64(ptr[h, t]), np.uint64(ptr[h, t + 1])):
                p = np.uint64(np.uint32(page[i]))
                both += last[p] == t - 1
                last[p] = t
            if t:
                common[h, t - 1] = both


@njit(cache=True, error_model="numpy")
def repeated(ptr, page, n_pages):
    """The first head that wants a page twice in a step, or -1."""
    last = np.empty(n_pages, np.int32)
    for h in range(ptr.shape[0]):
        last[:] = -1
        for t in range(ptr.shape[1] - 1):
            for i in range(np.uint64(ptr[h, t]), np.uint64(ptr[h, t + 1])):
                p = np.uint64(np.uint32(page[i]))
                if last[p] == t:
                    return h
                last[p] = t
    return -1
