"""What every query head reads, logged inside the engine as record.py logs a model of transformers.

The engine attends as ever, over all of its cache. Beside it the rows of a step's attention are made again, from the
engine's own queries and keys, and go where the recorder's go: rows.py. One request at a time, on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from wakekv.errors import ModelError
from wakekv.logs.trace import PAGE, PROMPT_ROWS
from wakekv.recording.rows import Rows


class RowLog:
    """n_read tokens of the prompt are read before the first step (all but its last, which is what the first step is
    fed); n_tokens: of the whole text; needle: token spans; k: weights kept a head and step."""

    def __init__(self, n_layers: int, n_read: int, n_tokens: int, needle: Sequence[Sequence[int]], k: int):
        self.n_layers, self.n_read, self.n_tokens = n_layers, n_read, n_tokens
        self.rows = Rows(n_layers, k, [list(span) for span in needle], n_tokens)
        self.keys: dict[int, torch.Tensor] = {}  # by layer: [KV head, token, d]
        self.n_held: dict[int, int] = {}  # by layer: tokens whose keys are here
        self.prompt_pages: dict[int, torch.Tensor] = {}  # by layer: float32 [head, 32, page]
        self.steps: list[dict[str, np.ndarray]] = []

    def note(self, layer: int, query: torch.Tensor, key: torch.Tensor, n_seen: int, scale: float) -> None:
        """A pass of a layer: query [token, head, d] and key [token, KV head, d] of the last of n_seen tokens.

        ModelError for one that leaves tokens out."""
        first, n_kv = n_seen - len(key), key.shape[1]
        if layer not in self.keys:
            self.keys[layer] = key.new_zeros(n_kv, self.n_tokens, key.shape[2])
            n_pages = -(-(self.n_read + 1) // PAGE)
            self.prompt_pages[layer] = torch.zeros(query.shape[1], PROMPT_ROWS, n_pages)
        if first != self.n_held.get(layer, 0):
            raise ModelError(
                f"layer {layer} was fed from token {first} on, after {self.n_held.get(layer, 0)}: log one request of "
                "which the engine has cached nothing"
            )
        self.n_held[layer] = n_seen
        self.keys[layer][:, first:n_seen] = key.transpose(0, 1)
        start = max(first, self.n_read - PROMPT_ROWS)
        if start >= n_seen:
            return
        asked = query[start - first :].transpose(0, 1)  # [head, row, d]
        grouped = asked.reshape(n_kv, -1, asked.shape[2])
        scores = torch.matmul(grouped, self.keys[layer][:, :n_seen].transpose(1, 2)).float().mul_(scale)
        scores = scores.view(len(asked), -1, n_seen)
        if n_seen > self.n_read:
            self.rows.note(layer, scores[:, 0], torch.softmax(scores[:, 0], -1))
            if layer == self.n_layers - 1:
                self.steps.append(self.rows.take())
            return
        later = torch.arange(n_seen) > torch.arange(start, n_seen)[:, None]
        pages = self.prompt_pages[layer]
        weights = scores.new_zeros(*scores.shape[:2], pages.shape[2] * PAGE)
        weights[:, :, :n_seen] = torch.softmax(scores.masked_fill_(later, -torch.inf), -1)
        at = PROMPT_ROWS - self.n_read + start
        pages[:, at : at + scores.shape[1]] = weights.unflatten(-1, (-1, PAGE)).sum(-1)

    def arrays(self) -> dict[str, np.ndarray]:
        """What was logged, by its name in a Trace, head-major."""
        layers = range(self.n_layers)
        n_held = self.n_read + len(self.steps)
        means = [
            torch.stack([page.mean(1) for page in self.keys[i][:, :n_held].float().split(PAGE, 1)], 1) for i in layers
        ]
        logged = {name: np.stack([step[name] for step in self.steps], 1) for name in self.steps[0]}
        logged["prompt_pages"] = torch.cat([self.prompt_pages[i] for i in layers]).half().numpy()
        return logged | {"key_means": torch.cat(means).half().numpy()}
