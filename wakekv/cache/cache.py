"""ReversibleCache: a cache for transformers that keeps a budget of pages on the fast tier and brings others back.

It attends through transformers' public interfaces (cache layers, an attention function, a mask function), so any
decoder that uses them will do. Keys are stored as attention sees them, rotated already, and softmax does not care about
order: attention runs straight over the slots.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from wakekv.cache.books import Books
from wakekv.cache.layer import PagedLayer, Sizes
from wakekv.cache.reading import How
from wakekv.cache.settings import Settings
from wakekv.cache.shared import Shared
from wakekv.cache.steps import Steps, windowed
from wakekv.errors import CacheError, InputError
from wakekv.logs.demand import Demand
from wakekv.recording.attention import REFUSED


class ReversibleCache(Cache):
    """Pages of a model's full-attention layers in two tiers; layers with a sliding window keep their own cache.

        cache = ReversibleCache(model.config, budget=64)
        with cache.attached(model):
            model.generate(ids, past_key_values=cache)

    The arguments are those of Settings. `demands()` are the wants so far, one Demand a sequence: `replay` of one gives
    the misses and residents that this cache has. Raises InputError for arguments that do not fit, CacheError for what a
    model or a caller asks in vain; after a CacheError the cache is as it was before the pass that raised it.
    """

    def __init__(self, config: PreTrainedConfig, budget: int | None = None, **settings: Any):
        self.config, self.settings = config, Settings(budget=budget, **settings)
        text, page = config.get_text_config(), self.settings.page
        max_tokens = self.settings.max_tokens or getattr(text, "max_position_embeddings", None)
        if max_tokens is None:
            raise InputError("this model states no longest text: give max_tokens")
        folder = None if self.settings.slow is None else Path(self.settings.slow)
        sizes = Sizes(page, -(-max_tokens // page), max(1, self.settings.block // page), folder)
        layers = DynamicCache(config=text).layers
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[i] = PagedLayer(i, sizes)
            elif not isinstance(layer, DynamicSlidingWindowLayer):
                raise InputError(f"layer {i} of this model keeps a {type(layer).__name__}, which has no pages")
        super().__init__(layers=layers)
        self.paged: list[PagedLayer] = [layer for layer in layers if isinstance(layer, PagedLayer)]
        self._attached = False
        self._start_over()

    def _start_over(self) -> None:
        self.books, self._pads, self._stepping = Books(), None, False
        self.steps = Steps(self.settings, self.paged, self.books)
        self._seen: set[int] = set()  # layers that this pass has come to
        self._masks: list[torch.Tensor] = []
        self._windows: list[tuple] = []

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[ReversibleCache]:
        """Within this block `model` attends through this cache; afterwards as before, and nothing stays registered."""
        name, before = f"wakekv-cache-{id(self)}", model.config._attn_implementation
        AttentionInterface.register(name, self.attend)
        AttentionMaskInterface.register(name, self.mask)
        try:
            model.set_attn_implementation(name)
            self._attached = True
            yield self
        finally:
            self._attached = False
            model.set_attn_implementation(before)
            for interface in (AttentionInterface, AttentionMaskInterface):
                interface._global_mapping.pop(name)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._attached:
            raise CacheError("this cache reads pages itself: run the model inside `with cache.attached(model):`")
        if key_states.requires_grad:
            raise CacheError("this cache keeps no gradients: run the model inside `with torch.no_grad():`")
        if layer_idx in self._seen:  # the pass before this one broke off
            self._undo()
        if not self._seen:
            self._stepping = key_states.shape[2] == 1 and self.get_seq_length() > 0
            self._windows = [
                (layer, dict(layer.__dict__)) for layer in self.layers if not isinstance(layer, PagedLayer)
            ]
            self.books.device = key_states.device
        self._seen.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The mask function: SDPA's for layers with a window and for the first pass; later ones need none."""
        padding, window = kwargs.get("attention_mask"), kwargs.get("local_size")
        if self.paged:
            self._note_padding(padding, kwargs["kv_length"] if window is None else None)
        if window is None and kwargs.get("mask_function", causal_mask_function) is not causal_mask_function:
            raise CacheError("this model's mask is not plainly causal: its pages cannot be read out of order")
        if window is None and self.get_seq_length() > 0:
            return None
        mask = sdpa_mask(*args, **kwargs)
        self._masks.append(mask)
        return mask

    def _note_padding(self, padding: torch.Tensor | None, n: int | None) -> None:
        """Padding stands on the left and stays as it is; CacheError otherwise."""
        if n is None:
            return
        seen = None if padding is None or bool(padding[:, :n].all()) else padding[:, :n].bool()
        n_pad = None if seen is None else n - seen.sum(1)
        if seen is not None and bool((seen & (torch.arange(n, device=seen.device) < n_pad[:, None])).any()):
            raise CacheError("the attention mask has holes or padding on the right: pad on the left only")
        length = self.get_seq_length()
        if length:  # a sequence that was padding so far may go on with it
            old, new = (torch.zeros(1) if x is None else x.cpu() for x in (self._pads, n_pad))
            if bool(((old != new) & ((old < length) | (new < old))).any()):
                raise CacheError("the padding differs from that of the first pass: call reset() before another batch")
        self._pads = n_pad

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [sequence, head, row, d]
        key: torch.Tensor,  # what `update` returned
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention function: the output [sequence, row, head, d] and, as with SDPA, no weights."""
        try:
            for name in REFUSED:
                if kwargs.get(name) is not None:
                    raise CacheError(f"this model's attention uses {name!r}, which is not implemented here")
            if dropout:
                raise CacheError("the model is in training, with dropout: call model.eval()")
            if attention_mask is not None and not any(attention_mask is mask for mask in self._masks):
                raise CacheError("a mask of the caller's own cannot be used with pages: give a 2-D mask of padding")
            layer = self.layers[module.layer_idx]
            how = How(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
            if not isinstance(layer, PagedLayer):
                out = windowed(module, query, key, value, attention_mask, how, kwargs)
            elif layer.held is None or layer.held[0] is not key:
                raise CacheError(f"layer {layer.index} attends with another cache than the one attached to the model")
            elif self._stepping:
                out = self.steps.attend(module, layer, query, how)
            else:
                out = self._pass(module, layer, query, key, value, attention_mask, how, kwargs)
            if module.layer_idx == len(self.layers) - 1:
                self._commit()
            return out, None
        except BaseException:
            self._undo()
            raise

    def _pass(self, module, layer, query, key, value, mask, how, kwargs) -> torch.Tensor:
        """A pass of many tokens over all that was ever kept."""
        layer.n_pad = None if self._pads is None else self._pads.repeat_interleave(layer.n_kv)
        grouped = query.reshape(layer.n_rows, -1, *query.shape[2:])  # [row, group, query, d]
        if layer.get_seq_length() == 0 and how.softcap is None:
            out = sdpa_attention_forward(module, query, key, value, mask, scaling=how.scaling, **kwargs)[0]
        else:
            self.books.passes_bytes += layer.n_closed * layer.n_rows * layer.reservoir.page_bytes
            out = layer.attend_all(grouped, how).view(*query.shape[:3], -1).transpose(1, 2)
        layer.keep(grouped, how, note_rows=self.steps.host is None)
        return out

    def _commit(self) -> None:
        if self._stepping and self.paged:
            with self.books.timing("settle_s"):
                self.steps.host.commit()
        else:
            for layer in self.paged:
                layer.advance()
        self._seen, self._masks, self._windows = set(), [], []

    def _undo(self) -> None:
        """Back to where the pass began."""
        for layer in self.paged:
            layer.drop()
        for layer, state in self._windows:
            layer.__dict__.clear()
            layer.__dict__.update(state)
        if self.steps.host is not None:
            self.steps.host.undo()
        self._seen, self._masks, self._windows = set(), [], []

    @torch.inference_mode()
    def prefill(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, chunk: int = 1024
    ) -> torch.Tensor:
        """Feed ids [sequence, token] in chunks to the attached model; mask: which are real. The last token's logits."""
        for at in range(0, ids.shape[1], chunk):
            seen = None if mask is None else mask[:, : self.get_seq_length() + chunk]
            logits = model(ids[:, at : at + chunk], attention_mask=seen, past_key_values=self, logits_to_keep=1).logits
        return logits[:, -1]

    def again(self, **changes: Any) -> ReversibleCache:
        """Another cache that holds the same text, with some settings changed: one prefill serves many of them.

        CacheError once decoding has begun. page and max_tokens cannot be changed.
        """
        fixed = {"page", "max_tokens"} & set(changes)
        if fixed:
            raise InputError(f"{min(fixed)} cannot be changed, since the pages are written: make a new cache")
        new = ReversibleCache(self.config, **{**self.settings.__dict__, **changes})
        new.hold(self)
        return new

    def hold(self, other: ReversibleCache) -> None:
        """Hold what another cache holds, of the same page size and max_tokens. CacheError once that has decoded."""
        if other.steps.host is not None:
            raise CacheError("decoding has begun, so pages have moved: take another cache before the first step")
        self._pads = other._pads
        for i, layer in enumerate(other.layers):
            if isinstance(layer, PagedLayer):
                self.layers[i].copy_from(layer)
            else:
                self.layers[i] = copy.deepcopy(layer)

    def demands(self) -> list[Demand]:
        """What was wanted so far, one Demand a sequence; its pages count from the first that is not all padding."""
        if self.steps.host is None:
            raise CacheError("nothing has been decoded yet, so nothing was wanted: decode a step first")
        return [wants.demand() for wants in self.steps.host.wants]

    def resident(self) -> list[torch.Tensor]:
        """bool [KV head, page] of each sequence, as `demands` counts them: the pages on the fast tier."""
        n, firsts = self.paged[0].n_closed, self.steps.host.firsts
        there = [(layer.pool.slot_of[:, :n] >= 0).view(len(firsts), layer.n_kv, n).cpu() for layer in self.paged]
        return [torch.cat([x[b, :, first:] for x in there]) for b, first in enumerate(firsts)]

    def tiers(self) -> dict[str, int]:
        """Bytes by tier: on the fast one pages (and open pages), digests, tables, windows; slow: pages held there, and
        notes, what policies are told of pages."""
        paged = [layer for layer in self.paged if layer.is_initialized]
        pools = [layer.pool for layer in paged]
        stores = {pool.store for pool in pools if isinstance(pool, Shared)}
        windows = [x for layer in self.layers if layer not in self.paged for x in (layer.keys, layer.values)]
        return {
            "pages": sum(x.n_bytes for x in (*pools, *stores)),
            "digests": sum(x.numel() * x.element_size() for layer in paged for x in (layer.digests, layer.reach)),
            "tables": sum(pool.n_table_bytes for pool in pools),
            "windows": sum(x.numel() * x.element_size() for x in windows if x is not None),
            "slow": sum(int(layer.reservoir.held.sum()) * layer.reservoir.page_bytes for layer in paged),
            "notes": sum(x.numel() * x.element_size() for layer in paged for x in (layer.means, layer.prompt_rows)),
        }

    def reset(self) -> None:
        super().reset()
        self._start_over()

    def crop(self, tokens_to_remove: int) -> None:
        raise CacheError(
            "this cache cannot be cropped, as assisted decoding and prompt lookup need, since what a trim moved stays "
            "moved: call reset() and feed again"
        )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(self.n_sequences)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self.n_sequences).repeat_interleave(repeats))

    @property
    def n_sequences(self) -> int:
        for layer in self.layers:
            if layer.is_initialized:
                return layer.n_rows // layer.n_kv if isinstance(layer, PagedLayer) else len(layer.keys)
        raise CacheError("the cache is empty, so it has no sequences yet")

    def _select(self, index: torch.Tensor) -> None:
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.select(index)
            else:
                layer.batch_select_indices(index.to(layer.keys.device))
        self._pads = None if self._pads is None else self._pads[index.to(self._pads.device)]
        if self.steps.host is not None:
            self.steps.host.select(index.tolist())
