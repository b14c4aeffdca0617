"""A given text in place of the engine's own choice, and what the engine thought of every next token of it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEPT: dict[str, dict[int, torch.Tensor]] = {}  # by name and token: float32 [vocabulary] log-probabilities


class Forced(AdapterLogitsProcessor):
    """For requests whose extra_args hold `text`, the tokens to be fed; `name`, under which log-probabilities are kept.
    The engine's own interface, so that the untouched engine can be asked in the same way."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        extra = params.extra_args or {}
        if "text" not in extra:
            return None
        text, kept = extra["text"], KEPT.setdefault(extra["name"], {})

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            at = len(output_ids)  # after a part of a prompt, too: the whole one overwrites it
            kept[at] = torch.log_softmax(logits.float(), -1)
            forced = torch.full_like(logits, -torch.inf)
            forced[text[at]] = 0.0
            return forced

        return force
