"""transformers' own generation as the engine of a sweep: its cache, dense, and ours in front of the same model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from wakekv.cache import ReversibleCache
from wakekv.errors import InputError
from wakekv.serving.loads import Load
from wakekv.serving.sweep import timed, told
from wakekv.vllm.settings import Settings


class Clock(StoppingCriteria):
    """Stops nothing; notes when each token came: seconds, and CPU seconds."""

    def __init__(self):
        self.wall, self.cpu = [time.perf_counter()], [time.process_time()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Given(LogitsProcessor):
    """Given texts, [request, token], in place of the model's own choice, and what it thought of every next token."""

    def __init__(self, texts: Sequence[Sequence[int]], device: torch.device):
        self.texts, self.kept = torch.tensor(texts, device=device), []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.texts[:, len(self.kept), None]
        self.kept.append(torch.log_softmax(scores.float(), -1).cpu())
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


class Transformers:
    """What `serving.Pair` answers, by the model of `loaded` (models.Loaded). batch: answers written at a time.

    Settings are those of the plugin; timing "exact" ranks at each step only. One difference: a head that flexicache
    keeps whole is also read whole here, where the plugin, as the method, has it read its best pages.
    """

    def __init__(self, loaded: Any, batch: int = 8):
        self.model, self.batch = loaded.model, batch
        self.pad = loaded.tokenizer.eos_token_id or 0

    def __enter__(self) -> Transformers:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def run(self, settings: Mapping | None, load: Load) -> dict[str, Any]:
        """One batch, prefill included: a row."""
        tokens, clock, cache = self._generate(settings, load.prompts, load.n_tokens)
        steps, cpu = ([b - a for a, b in zip(times[1:], times[2:])] for times in (clock.wall, clock.cpu))
        row = timed({"tokens": tokens, "elapsed_s": clock.wall[-1] - clock.wall[0], "reached": len(tokens),
                     "prefill_s": clock.wall[1] - clock.wall[0], "step_s": steps, "cpu_step_s": cpu})  # fmt: skip
        if settings is not None:
            books = vars(cache.books)
            of_vllm = {"steps": books["n_steps"], "wants": books["n_wants"], "place_s": books["settle_s"]}
            row |= told(books | of_vllm, cache.tiers())
        return row

    def forced(self, settings: Mapping | None, load: Load, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """As Pair.forced."""
        given = Given(texts, self.model.device)
        self._generate(settings, load.prompts, len(texts[0]), given)
        return {str(i): [kept[i] for kept in given.kept] for i in range(len(texts))}

    def answers(self, settings: Mapping | None, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[list[int]]:
        """As Pair.answers."""
        parts = [prompts[i : i + self.batch] for i in range(0, len(prompts), self.batch)]
        return [tokens for part in parts for tokens in self._generate(settings, part, n_tokens)[0]]

    def demands(self, settings: Mapping, load: Load) -> list[Any]:
        """As Pair.demands."""
        return self._generate(settings, load.prompts, load.n_tokens)[2].demands()

    @torch.inference_mode()
    def _generate(
        self, settings: Mapping | None, prompts: Sequence[Sequence[int]], n_tokens: int, *processors: LogitsProcessor
    ) -> tuple[list[list[int]], Clock, Cache]:
        """Greedy text, its times, and the cache that was used; shorter prompts are padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self.model.device
        cache, clock = self._cache(settings, longest + n_tokens), Clock()
        with cache.attached(self.model) if settings is not None else nullcontext():
            out = self.model.generate(
                ids.to(device), attention_mask=mask.to(device), past_key_values=cache, do_sample=False,
                max_new_tokens=n_tokens, eos_token_id=None, pad_token_id=self.pad,
                logits_processor=LogitsProcessorList(processors), stopping_criteria=StoppingCriteriaList([clock]),
            )  # fmt: skip
        return out[:, longest:].tolist(), clock, cache

    def _cache(self, settings: Mapping | None, max_tokens: int) -> Cache:
        config = self.model.config
        if settings is None:
            return DynamicCache(config=config)
        asked = Settings.of(settings)
        if asked.timing == "exact" and asked.every > 1:
            raise InputError("with transformers, timing exact ranks at each step: ask for every=1 or timing lagged")
        every = {"every": asked.every} if asked.timing == "lagged" else {}
        return ReversibleCache(
            config, asked.budget, policy=asked.policy, mode=asked.timing, wants=asked.n_wants, page=asked.page,
            least=asked.least, max_tokens=max_tokens, slow=asked.folder, **every,
        )  # fmt: skip
