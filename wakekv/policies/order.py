"""Orders out of scores: several ways of choosing pages under one budget, without looking at the budget."""

from __future__ import annotations

from functools import reduce

import numpy as np


def places(score: np.ndarray, among: np.ndarray) -> np.ndarray:
    """float [head, page]: place of each page in its head's order by falling score, 0 first, ties to the later page;
    inf outside `among`."""
    n = score.shape[1]
    fall = np.where(among, -score, np.inf).astype(np.float32) + np.float32(0)  # -0 becomes 0
    bits = fall.view(np.int32)
    bits = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)  # whole numbers in the order of the floats
    packed = np.sort(bits << 32 | np.arange(n - 1, -1, -1), axis=1)  # sorts far faster than argsort does
    place = np.empty(score.shape, np.float64)
    np.put_along_axis(place, n - 1 - (packed & 0xFFFFFFFF), np.arange(n, dtype=np.float64)[None], axis=1)
    return np.where(among, place, np.inf)


def interleave(*orders: tuple[np.ndarray, float]) -> np.ndarray:
    """[head, page]: one order out of several, each given as (places, part): of the first B pages every order has
    supplied its part, whatever B is. A page that stands in two counts where it comes first."""
    total = sum(part for _, part in orders)
    return -reduce(np.minimum, [(place + 1.0) * (total / part) for place, part in orders])


def newest_first(among: np.ndarray) -> np.ndarray:
    """float [page]: 0 for the newest page of `among` (bool [page]), 1 for the one before; inf outside it."""
    return np.where(among, np.cumsum(among[::-1])[::-1] - 1.0, np.inf)
