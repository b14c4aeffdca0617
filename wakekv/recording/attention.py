"""The attention that the recorder attaches to a model, and the cache it keeps: the only place that sees whole rows.

Both use the public interfaces of transformers (an attention function, a mask function, cache layers), so any decoder
that does can be logged. Queries are grouped by KV head, keys are never repeated, and the weights that are logged are
those the output was made of. Prefill runs through SDPA, but for the last 32 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from wakekv.errors import ModelError
from wakekv.logs.trace import PAGE, PROMPT_ROWS
from wakekv.recording.rows import HELD_BYTES, Rows

NAME = "wakekv"
REFUSED = ("s_aux", "position_bias")  # arguments that change the weights in ways that are not implemented here


class HeldLayer(CacheLayerMixin):
    """Keys and values [1, kv_head, length, d] of one layer, in memory that is touched once and never grows or moves.

    A sliding-window layer keeps all its keys as well: its attention looks at the last ones, at their true positions.
    """

    is_sliding = False

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.n_held = length, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            torch.full((*x.shape[:2], self.length, x.shape[3]), 0, dtype=x.dtype, device=x.device)
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.n_held = self.n_held, self.n_held + key_states.shape[2]
        self.keys[:, :, start : self.n_held] = key_states
        self.values[:, :, start : self.n_held] = value_states
        return self.keys[:, :, : self.n_held], self.values[:, :, : self.n_held]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_held + query_length, 0

    def get_seq_length(self) -> int:
        return self.n_held

    def get_max_length(self) -> int:
        return self.length

    def page_means(self) -> np.ndarray:
        """float16 [kv_head, page, d]: the mean key of each page, the last one of what it holds."""
        pages = self.keys[0, :, : self.n_held].float().split(PAGE, dim=1)
        return torch.stack([page.mean(1) for page in pages], 1).half().cpu().numpy()


class Reader:
    """Attends for a model of `n_layers` layers over up to `length` tokens, and notes in `rows` what its heads read.

    `mode` says what the next forward pass is: "prefill" (nothing is noted), "rows" (up to 32 rows whose page weights
    are kept in `prompt_pages`), "step" (a token, or several that are known, each a step to `take`) or "plain" (the
    same, nothing noted).
    """

    def __init__(self, n_layers: int, length: int, n_prompt: int, needle: list[list[int]], k: int) -> None:
        self.mode, self.n_prompt = "prefill", n_prompt
        self._new = partial(Rows, n_layers, k, needle, length)
        self._steps: list[Rows] = []  # noted and not yet taken
        self._taken, self.n_heads = 0, 0  # steps taken; heads of all layers, known once one is
        self.cache = Cache(layers=[HeldLayer(length) for _ in range(n_layers)])
        self.windows: dict[int, int | None] = {}  # layer -> how many positions it sees; None: all
        self.prompt_pages: dict[int, np.ndarray] = {}  # layer -> float16 [head, 32, page]
        self._masks: dict[int, tuple[torch.Tensor, list[int], int | None]] = {}  # by id: mask, starts, window

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this block `model` attends through this reader; afterwards as before, and nothing stays registered.

        ModelError for a model that has an attention of its own.
        """
        before = model.config._attn_implementation
        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, self.mask)
        try:
            model.set_attn_implementation(NAME)
            if model.config._attn_implementation != NAME:
                raise ModelError("this model does not attend through transformers' interface: log another one")
            yield
        finally:
            model.set_attn_implementation(before)
            for interface in (AttentionInterface, AttentionMaskInterface):
                interface._global_mapping.pop(NAME)

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The mask function: SDPA's. Of a step it remembers where the visible part of the context starts."""
        if self.mode == "prefill":
            return sdpa_mask(*args, **kwargs)
        mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "device": "cpu"})
        if mask is None:
            raise ModelError("this model reads what comes later, too: only a decoder can be logged")
        if self.mode == "rows":
            return mask.to(kwargs.get("device", "cpu"))
        n_rows, n_seen = mask.shape[2:]
        starts = mask[0, 0].int().argmax(1).tolist()
        for row, start in enumerate(starts):
            end = n_seen - n_rows + row + 1
            if not mask[0, 0, row, start:end].all() or mask[0, 0, row, end:].any():
                raise ModelError("this model's attention mask has holes: such attention cannot be logged")
        if starts == [0]:
            return None
        mask = mask if n_rows == 1 else mask.to(kwargs.get("device", "cpu"))
        self._masks[id(mask)] = mask, starts, kwargs.get("local_size")
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, head, row, d]
        key: torch.Tensor,  # [1, kv_head, position, d], what HeldLayer returned
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention function: the output [1, row, head, d] and, as with SDPA, no weights."""
        for name in REFUSED:
            if kwargs.get(name) is not None:
                raise ModelError(f"this model's attention uses {name!r}, which the recorder does not implement")
        layer = module.layer_idx
        if dropout or query.shape[0] != 1 or key.shape[2] != self.cache.layers[layer].n_held:
            raise ModelError(
                f"layer {layer}: the recorder needs one sequence, no dropout and a cache of the layer's own"
            )
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.mode == "prefill" and softcap is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        if self.mode in ("prefill", "rows"):
            firsts = range(0, query.shape[2], PROMPT_ROWS)
            out = [self._attend_rows(layer, query, key, value, attention_mask, scaling, softcap, at) for at in firsts]
            return torch.cat(out, 1), None
        if attention_mask is not None and id(attention_mask) not in self._masks:
            raise ModelError(f"layer {layer} alters the attention mask on its way: such attention cannot be logged")
        _, starts, window = self._masks.get(id(attention_mask), (None, [0], None))
        key, value = key[0, :, min(starts) :], value[0, :, min(starts) :]
        n_rows, n_seen = query.shape[2], key.shape[1]
        scores = _scores(query.reshape(key.shape[0], -1, query.shape[-1]), key, scaling, softcap)
        scores = scores.view(-1, n_rows, n_seen)  # [head, row, position]
        if n_rows > 1:
            scores.masked_fill_(~attention_mask[0, 0, :, min(starts) :], -torch.inf)
        weights = torch.softmax(scores, -1)
        if self.mode == "step":
            self.windows[layer] = kwargs.get("sliding_window") or window
            self._note(layer, scores, weights, starts)
        out = torch.matmul(weights.to(value.dtype).view(len(key), -1, n_seen), value)
        return out.view(len(weights), n_rows, -1).transpose(0, 1)[None], None

    def _note(self, layer: int, scores: torch.Tensor, weights: torch.Tensor, starts: list[int]) -> None:
        """Each row of [head, row, position] as a step of its own, without what it does not see."""
        n_rows, n_seen = weights.shape[1:]
        if not self._steps:
            self._steps = [self._new(HELD_BYTES // n_rows) for _ in range(n_rows)]
            for row, rows in enumerate(self._steps):
                rows.step = self._taken + row
        for row, (rows, start) in enumerate(zip(self._steps, starts, strict=True)):
            seen = slice(start - min(starts), n_seen - n_rows + row + 1)
            rows.note(layer, scores[:, row, seen].contiguous(), weights[:, row, seen].contiguous(), start)

    def take(self) -> dict[str, np.ndarray]:
        """What the first step that is noted and not yet taken has read: see Rows.take."""
        self._masks.clear()
        rows = self._steps.pop(0) if self._steps else self._new()
        found = rows.take()
        self._taken, self.n_heads = self._taken + 1, rows.n_heads
        return found

    def check(self, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """ModelError unless what attended has as many heads, and as wide, as the model's configuration says."""
        keys = [layer.keys.shape for layer in self.cache.layers]
        found = self.n_heads, sum(shape[1] for shape in keys), {shape[3] for shape in keys}
        if found != (n_heads, n_kv_heads, {head_dim}):
            raise ModelError(
                f"the model attends with {found} heads, KV heads and widths, its configuration says "
                f"{(n_heads, n_kv_heads, {head_dim})}: such a model cannot be logged"
            )

    def _attend_rows(self, layer, query, key, value, mask, scaling, softcap, first) -> torch.Tensor:
        """Attention of the up to 32 rows from `first` on, with the weights at hand: for prompt pages, or a soft cap."""
        n_rows, n_seen = query.shape[2], key.shape[2]
        if mask is None:
            mask = torch.ones(n_rows, n_seen, dtype=torch.bool, device=key.device).tril(n_seen - n_rows)[None, None]
        rows = slice(first, first + PROMPT_ROWS)
        query, mask = query[0, :, rows], mask[0, 0, rows]
        grouped = query.reshape(key.shape[1], -1, query.shape[-1])  # [kv_head, group * row, d]
        scores = _scores(grouped, key[0], scaling, softcap).view(query.shape[0], -1, n_seen)
        weights = torch.softmax(scores.masked_fill_(~mask, -torch.inf), -1)  # [head, row, position]
        if self.mode == "rows":
            pages = weights.new_zeros(len(weights), PROMPT_ROWS, -(-self.n_prompt // PAGE) * PAGE)
            pages[:, PROMPT_ROWS - weights.shape[1] :, :n_seen] = weights
            self.prompt_pages[layer] = pages.unflatten(-1, (-1, PAGE)).sum(-1).half().cpu().numpy()
        out = torch.matmul(weights.to(value.dtype).view(key.shape[1], -1, n_seen), value[0])
        return out.view(len(weights), -1, value.shape[-1]).transpose(0, 1)[None]


def _scores(query: torch.Tensor, key: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """What softmax is taken of, float32 [kv_head, query, position]; keys are [kv_head, position, d]."""
    scores = torch.matmul(query, key.transpose(1, 2)).float().mul_(scaling)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)
