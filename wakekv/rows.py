"""From whole rows of attention to what is logged of them: exact top k, masses and entropy, at a small price.

The top k of a row is searched among the weights above a floor, a share of the k-th weight one step ago; where fewer
than k lie above it, the floor becomes the exact k-th weight. Either way the result is the exact top k in the order
(-weight, position). Whatever can wait is done once a step for all layers together.

On a CUDA device the floor would cost a host synchronisation per layer, so rows are sorted there instead and the host
reads once a step.
"""

from __future__ import annotations

import numpy as np
import torch

from wakekv.errors import ModelError
from wakekv.trace import LOCAL, SINKS, position_dtype

SLACK = 0.8  # share of the last k-th weight above which the next step looks first
MASSES = ("needle_mass", "sink_mass", "local_mass")
NOT_A_NUMBER = "layer {} has attention weights that are not numbers at step {}: load the model with dtype float32"


class Rows:
    """What the heads of `n_layers` layers read, a step at a time: `note` each layer, then `take` the step.

    needle: token spans [start, stop). n_tokens: the longest context to come; it decides the dtype of positions.
    """

    def __init__(self, n_layers: int, k: int, needle: list[list[int]], n_tokens: int) -> None:
        self.n_layers, self.k, self.dtype = n_layers, k, position_dtype(n_tokens)
        self.step, self.n_heads = 0, 0  # steps taken; heads of all layers, known once one is
        self._needle = np.unique([i for start, stop in needle for i in range(start, stop)]).astype(np.int64)
        self._noted: dict[int, tuple] = {}
        self._columns: dict[int, tuple[torch.Tensor, list[slice]]] = {}  # this step's, by the start of the window
        self._floor: dict[int, np.ndarray] = {}  # by layer: float32 [head, 1]

    def note(self, layer: int, scores: torch.Tensor, weights: torch.Tensor, start: int = 0) -> None:
        """Read one layer's rows, float32 [head, position - start]: scores before and weights after the softmax."""
        if layer in self._noted:
            raise ModelError(f"layer {layer} attends twice in step {self.step}: such a model cannot be logged")
        if start not in self._columns:
            columns, parts = self._special(start + weights.shape[1], start)
            self._columns[start] = torch.from_numpy(columns).to(weights.device), parts
        columns, parts = self._columns[start]
        if weights.is_cuda:
            marked = weights[:, columns]
            masses = torch.stack([marked[:, part].sum(1) for part in parts])
            best = torch.sort(weights, dim=1, descending=True, stable=True).indices[:, : self.k].sort(1).values
            kept, dot = weights.gather(1, best), torch.linalg.vecdot(weights, scores)
            self._noted[layer] = best + start, kept, scores.gather(1, best), masses, dot
            return
        scores, weights = scores.numpy(), weights.numpy()
        (n_heads, n_seen), need = weights.shape, min(self.k, weights.shape[1])
        floor = self._floor.setdefault(layer, np.full((n_heads, 1), np.inf, np.float32))
        edges = np.arange(n_heads + 1) * n_seen
        found = np.flatnonzero(weights >= floor)
        counts = np.diff(np.searchsorted(found, edges))
        short = counts < need
        if short.any():
            floor[short] = torch.topk(torch.from_numpy(weights[short]), need).values[:, -1:].numpy()
            found = np.flatnonzero(weights >= floor)
            counts = np.diff(np.searchsorted(found, edges))
            if (counts < need).any():  # only comparisons with NaN can fail this
                raise ModelError(NOT_A_NUMBER.format(layer, self.step))
        marked = weights[:, columns.numpy()]
        masses = np.stack([marked[:, part].sum(1) for part in parts])
        places = found - np.repeat(edges[:-1] - start, counts)
        dot = np.einsum("ij,ij->i", weights, scores)
        self._noted[layer] = places, weights.take(found), scores.take(found), masses, dot, counts

    def take(self) -> dict[str, np.ndarray]:
        """The step that every layer has noted: arrays by their name in a Trace. ModelError if one has not."""
        missing = sorted(set(range(self.n_layers)) - set(self._noted))
        if missing:
            raise ModelError(
                f"layer {missing[0]} logged nothing at step {self.step}: "
                "the recorder needs every layer to attend through transformers' attention interface"
            )
        noted = [self._noted[layer] for layer in range(self.n_layers)]
        if len({n[3].shape for n in noted}) > 1:
            raise ModelError("the layers of this model differ in their number of heads: such a model cannot be logged")
        places, values, scores = _side_by_side(noted)
        masses, dot = (np.concatenate(x, axis=-1) for x in zip(*(map(_host, n[3:5]) for n in noted), strict=True))
        best = values.argmax(1)[:, None]  # the first of equals, so the lowest position
        largest, its_score = (np.take_along_axis(x, best, 1)[:, 0] for x in (values, scores))
        entropy = its_score - np.log(largest) - dot  # log Z - sum of p * score
        if not np.isfinite(entropy).all():
            layer = int(np.flatnonzero(~np.isfinite(entropy))[0] // noted[0][3].shape[1])
            raise ModelError(NOT_A_NUMBER.format(layer, self.step))
        keep, kth = _top(values, self.k)
        if len(noted[0]) == 6:
            self._floor = dict(enumerate(np.split(SLACK * np.maximum(kth, 0)[:, None], self.n_layers)))
        slots = np.arange(self.k) < keep.sum(1)[:, None]
        positions = np.full(slots.shape, np.iinfo(self.dtype).max, self.dtype)
        weights = np.zeros(slots.shape, np.float16)
        positions[slots], weights[slots] = places[keep], values[keep]
        self._noted, self._columns, self.step, self.n_heads = {}, {}, self.step + 1, len(values)
        return {
            "positions": positions,
            "weights": weights,
            "top": np.take_along_axis(places, best, 1)[:, 0].astype(self.dtype),
            **dict(zip(MASSES, masses, strict=True)),
            "entropy": np.maximum(entropy, 0).astype(np.float32),
        }

    def _special(self, n_tokens: int, start: int) -> tuple[np.ndarray, list[slice]]:
        """Columns of needle, sinks and local window, each less those before it, in a row that begins at `start`."""
        sinks = np.setdiff1d(np.arange(min(SINKS, n_tokens)), self._needle)
        local = np.setdiff1d(np.arange(max(0, n_tokens - LOCAL), n_tokens), np.union1d(self._needle, sinks))
        groups = [g[(g >= start) & (g < n_tokens)] - start for g in (self._needle, sinks, local)]
        ends = np.cumsum([0, *map(len, groups)])
        return np.concatenate(groups), [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _side_by_side(noted: list[tuple]) -> list[np.ndarray]:
    """Candidates of all heads as [head, candidate]: places ascending, weights (-1 where there is none), scores."""
    if len(noted[0]) == 6:
        counts = np.concatenate([n[5] for n in noted])
        flat = [np.concatenate([n[i] for n in noted]) for i in range(3)]
    else:
        counts = np.repeat([n[0].shape[1] for n in noted], noted[0][0].shape[0])
        flat = [_host(torch.cat([n[i].flatten() for n in noted])) for i in range(3)]
    filled = np.arange(counts.max()) < counts[:, None]
    out = []
    for x in flat:
        padded = np.full(filled.shape, -1, x.dtype)
        padded[filled] = x
        out.append(padded)
    return out


def _top(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [head, candidate]: the k largest that are not -1, of equals the first; and the k-th value of each head."""
    width = values.shape[1]
    if width <= k:
        return values >= 0, values.min(1)
    kth = np.partition(values, width - k, axis=1)[:, width - k]
    keep = values >= np.maximum(kth, 0)[:, None]
    excess = keep.sum(1) - k
    for row in np.flatnonzero(excess > 0):
        equal = np.flatnonzero(values[row] == kth[row])
        keep[row, equal[-excess[row] :]] = False
    return keep, kth


def _host(x):
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else x
