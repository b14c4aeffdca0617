"""Several caches fed side by side in one pass, so that the model's weights are read once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from wakekv.cache import ReversibleCache
from wakekv.errors import InputError

NAME = "wakekv-panel"


class Panel(Cache):
    """To the model a batch of equal sequences, each of which a cache of its own keeps and attends to."""

    def __init__(self, caches: Sequence[ReversibleCache]):
        if any(cache.layers != cache.paged or cache.n_sequences != 1 for cache in caches):
            raise InputError("a panel takes caches of one sequence each, of a model without sliding windows")
        self.caches = caches
        super().__init__(layers=caches[0].layers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        for i, cache in enumerate(self.caches):
            cache.update(key_states[i : i + 1], value_states[i : i + 1], layer_idx)
        return key_states, value_states

    def attend(self, module, query, key, value, attention_mask, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """The attention function: to each its own."""
        outs = []
        for i, cache in enumerate(self.caches):
            held = cache.layers[module.layer_idx].held
            outs.append(cache.attend(module, query[i : i + 1], *held, None, **kwargs)[0])
        return torch.cat(outs), None


@torch.inference_mode()
def together(
    model: torch.nn.Module,
    caches: Sequence[ReversibleCache],
    tokens: Sequence[int],
    after: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """Feed all caches, which hold the same text, the same tokens one by one; a cache's float32 [token, vocabulary]
    logits each, as `quality.forced` gives them to within rounding.  after: called after every token.

    Raises InputError for caches that are not of one sequence, or of a model with sliding windows.
    """
    panel, out = Panel(caches), []
    with ExitStack() as stack:
        for cache in caches:
            stack.enter_context(cache.attached(model))
        AttentionInterface.register(NAME, panel.attend)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # a single token sees all before it
        try:
            model.set_attn_implementation(NAME)
            for token in tokens:
                ids = torch.full((len(caches), 1), token, device=model.device)
                out.append(model(ids, past_key_values=panel).logits[:, -1].float().cpu())
                after()
        finally:
            for interface in (AttentionInterface, AttentionMaskInterface):
                interface._global_mapping.pop(NAME)
    return list(torch.stack(out, 1))
