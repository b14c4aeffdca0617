"""How much of what a head wants at one step it wanted at the step before."""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True, error_model="numpy")
def adjacent_common(ptr, page, n_pages, common):
    """common int64 [head, step - 1]: pages wanted at step t and at t + 1."""
    for h in range(ptr.shape[0]):
        last = np.full(n_pages, -2, np.int64)
        for t in range(ptr.shape[1] - 1):
            for i in range(ptr[h, t], ptr[h, t + 1]):
                if last[page[i]] == t - 1 and t:
                    common[h, t - 1] += 1
                last[page[i]] = t
