"""From whole rows of attention to what is logged of them: exact top k, masses and entropy, at a small price.

Fold a row over itself and take the maxima: k of them are as large as the k-th largest maximum, so that is a floor below
which no weight of the top k lies, and few others lie above it when the folds are many times k. Nothing is guessed: the
result is the exact top k in the order (-weight, position). What can wait is done once a step for all layers together.

On a CUDA device counting what lies above the floor would make the host wait in every layer, so rows are sorted there
instead and the host reads once a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from wakekv.errors import ModelError
from wakekv.logs.trace import LOCAL, SINKS, position_dtype

HELD_BYTES = 64 << 20  # rows held for searching together: cheaper than one by one between the model's own work
FOLDS = 4  # a folded row is this many times k long: longer folds cost more to search, shorter ones let more through
MASSES = ("needle_mass", "sink_mass", "local_mass")


class _Noted(NamedTuple):
    """What is kept of one layer's rows [head, seen]; arrays, or tensors of a CUDA device."""

    shape: tuple[int, int]
    start: int  # position of the first column
    found: Any  # int64 [candidate]: flat indices into the rows, ascending
    weights: Any  # float32 [candidate]
    scores: Any  # float32 [candidate]
    dot: Any  # float32 [head]: sum of weight * score
    marked: Any  # float32 [head, column]: needle, sinks, local window


class Rows:
    """What the heads of `n_layers` layers read, a step at a time: `note` each layer, then `take` the step.

    needle: token spans [start, stop). n_tokens: the longest context to come; it decides the dtype of positions. held:
    bytes of rows that may wait to be searched together.
    """

    def __init__(self, n_layers: int, k: int, needle: list[list[int]], n_tokens: int, held: int = HELD_BYTES) -> None:
        self.n_layers, self.k, self.dtype, self._held = n_layers, k, position_dtype(n_tokens), held
        self.step, self.n_heads = 0, 0  # steps taken; heads of all layers, known once one is
        self._needle = np.unique([i for start, stop in needle for i in range(start, stop)]).astype(np.int64)
        self._noted: dict[int, Any] = {}  # by layer: a _Noted, or the arguments of its search
        self._held_bytes = 0
        self._columns: dict[int, tuple[torch.Tensor, list[slice]]] = {}  # this step's, by the start of the window

    def note(self, layer: int, scores: torch.Tensor, weights: torch.Tensor, start: int = 0) -> None:
        """Read one layer's rows, float32 [head, position - start]: scores before and weights after the softmax."""
        if layer in self._noted:
            raise ModelError(f"layer {layer} attends twice in step {self.step}: such a model cannot be logged")
        if start not in self._columns:
            columns, parts = self._special(start + weights.shape[1], start)
            self._columns[start] = torch.from_numpy(columns).to(weights.device), parts
        self._noted[layer] = scores, weights, start
        self._held_bytes += 2 * weights.nbytes
        if weights.is_cuda or self._held_bytes > self._held:
            self._read()

    def _read(self) -> None:
        """Search the rows that are held, and let go of them."""
        for layer, noted in self._noted.items():
            if not isinstance(noted, _Noted):
                search = _sorted if noted[1].is_cuda else _folded
                self._noted[layer] = search(*noted, self._columns[noted[2]][0], self.k)
        self._held_bytes = 0

    def take(self) -> dict[str, np.ndarray]:
        """The step that every layer has noted: arrays by their name in a Trace. ModelError if one has not."""
        missing = sorted(set(range(self.n_layers)) - set(self._noted))
        if missing:
            raise ModelError(
                f"layer {missing[0]} logged nothing at step {self.step}: "
                "the recorder needs every layer to attend through transformers' attention interface"
            )
        self._read()
        noted = [self._noted[layer] for layer in range(self.n_layers)]
        heads = [n.shape[0] for n in noted]
        layer_of, n_seen = np.repeat(range(self.n_layers), heads), np.repeat([n.shape[1] for n in noted], heads)
        edges = np.concatenate([[0], np.cumsum(n_seen)])  # where each head's row begins among all rows
        firsts = edges[np.cumsum([0, *heads[:-1]])]
        found = _host([n.found + int(first) for n, first in zip(noted, firsts, strict=True)])
        weights, scores, dot = (_host([n[i] for n in noted]) for i in range(3, 6))
        ends = np.searchsorted(found, edges)
        counts = np.diff(ends)
        if (counts < np.minimum(self.k, n_seen)).any():  # only comparisons with NaN can do that
            raise self._not_numbers(layer_of[counts < np.minimum(self.k, n_seen)][0])
        column = np.arange(counts.max())
        index = np.minimum(ends[:-1, None] + column, len(found) - 1)  # [head, candidate] -> candidate
        values = np.where(column < counts[:, None], weights[index], np.float32(-1))
        best = ends[:-1] + values.argmax(1)  # the first of equals, so the lowest position
        with np.errstate(invalid="ignore", divide="ignore"):
            entropy = scores[best] - np.log(weights[best]) - dot  # log Z - sum of weight * score
        if not np.isfinite(entropy).all():
            raise self._not_numbers(layer_of[~np.isfinite(entropy)][0])
        keep = _largest(values, self.k)
        kept = index.reshape(-1)[np.flatnonzero(keep)]
        slots = np.flatnonzero(np.arange(self.k) < keep.sum(1)[:, None])
        place = found - np.repeat(edges[:-1] - np.repeat([n.start for n in noted], heads), counts)
        positions = np.full((len(values), self.k), np.iinfo(self.dtype).max, self.dtype)
        stored = np.zeros(positions.shape, np.float16)
        positions.reshape(-1)[slots], stored.reshape(-1)[slots] = place[kept], weights[kept]
        masses = np.empty((len(MASSES), len(values)), np.float32)
        for start, (_, parts) in self._columns.items():
            alike = [n for n in noted if n.start == start]
            marked = _host([n.marked for n in alike])
            of_these = np.repeat([n.start == start for n in noted], heads)
            masses[:, of_these] = [marked[:, part].sum(1) for part in parts]
        self._noted, self._columns, self.step, self.n_heads = {}, {}, self.step + 1, len(values)
        return {
            "positions": positions,
            "weights": stored,
            "top": place[best].astype(self.dtype),
            **dict(zip(MASSES, masses, strict=True)),
            "entropy": np.maximum(entropy, 0).astype(np.float32),
        }

    def _not_numbers(self, layer: int) -> ModelError:
        return ModelError(
            f"layer {layer} has attention weights that are not numbers in the pass of step {self.step}: "
            "load the model with dtype float32"
        )

    def _special(self, n_tokens: int, start: int) -> tuple[np.ndarray, list[slice]]:
        """Columns of needle, sinks and local window, each less those before it, in a row that begins at `start`."""
        sinks = np.setdiff1d(np.arange(min(SINKS, n_tokens)), self._needle)
        local = np.setdiff1d(np.arange(max(0, n_tokens - LOCAL), n_tokens), np.union1d(self._needle, sinks))
        groups = [g[(g >= start) & (g < n_tokens)] - start for g in (self._needle, sinks, local)]
        ends = np.cumsum([0, *map(len, groups)])
        return np.concatenate(groups), [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _folded(scores: torch.Tensor, weights: torch.Tensor, start: int, columns: torch.Tensor, k: int) -> _Noted:
    """The search on a CPU: what lies above the k-th largest maximum of the folded rows."""
    scores, weights = scores.numpy(), weights.numpy()
    n_heads, n_seen = weights.shape
    n_folds = max(1, n_seen // (FOLDS * k))
    width = n_seen // n_folds
    kth = width - min(k, n_seen)
    crest = weights[:, : n_folds * width].reshape(n_heads, n_folds, width).max(1)
    found = np.flatnonzero(weights >= np.partition(crest, kth, axis=1)[:, kth, None])
    dot = np.einsum("ij,ij->i", weights, scores)
    kept = weights.reshape(-1)[found], scores.reshape(-1)[found]
    return _Noted(weights.shape, start, found, *kept, dot, weights[:, columns.numpy()])


def _sorted(scores: torch.Tensor, weights: torch.Tensor, start: int, columns: torch.Tensor, k: int) -> _Noted:
    """The search on a CUDA device: a stable sort, of which the host need not wait for anything."""
    n_heads, n_seen = weights.shape
    best = torch.sort(weights, dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
    found = (best + n_seen * torch.arange(n_heads, device=best.device)[:, None]).flatten()
    kept = weights.flatten()[found], scores.flatten()[found]
    return _Noted((n_heads, n_seen), start, found, *kept, torch.linalg.vecdot(weights, scores), weights[:, columns])


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """bool [head, candidate]: the k largest of each row that are not -1, of equals the first."""
    width = values.shape[1]
    if width <= k:
        return values >= 0
    kth = np.maximum(np.partition(values, width - k, axis=1)[:, width - k], 0)
    keep = values >= kth[:, None]
    excess = keep.sum(1) - k
    for row in np.flatnonzero(excess > 0):
        equal = np.flatnonzero(values[row] == kth[row])
        keep[row, equal[-excess[row] :]] = False
    return keep


def _host(pieces: list[Any]) -> np.ndarray:
    """The pieces of all layers as one array in host memory."""
    return torch.cat(pieces).cpu().numpy() if isinstance(pieces[0], torch.Tensor) else np.concatenate(pieces)
