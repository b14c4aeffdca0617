"""Tiny random decoders of several families, and prompts for them: what the tests of the recorder record."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import transformers

torch.set_num_threads(1)  # models this small only wait for a second one

SIZE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "mistral": lambda: transformers.MistralConfig(**SIZE, head_dim=8, sliding_window=24),
    "qwen2": lambda: transformers.Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZE, head_dim=16, sliding_window=16, layer_types=MIXED, query_pre_attn_scalar=7
    ),
    "gemma2": lambda: transformers.Gemma2Config(  # a soft cap on the scores
        **SIZE, head_dim=16, sliding_window=16, layer_types=MIXED, attn_logit_softcapping=3.0
    ),
}
WINDOWS = {
    "llama": [None] * 3,
    "mistral": [24] * 3,
    "qwen2": [None, 20, 20],
    "gemma3": [16, None, 16],
    "gemma2": [16, None, 16],
}


def model(family="llama", seed=0, **changes):
    """A random model of `family`, in eval mode, with the attention that shows its weights."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config.update(changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def loaded(family="llama", seed=0, end=None, **changes):
    """What models.load gives, around a tiny model; `end` is its end-of-sequence id."""
    made = model(family, seed, **changes)
    return SimpleNamespace(name=f"tiny-{family}", model=made, tokenizer=SimpleNamespace(eos_token_id=end), source={})


def prompt(n=60, n_script=None, seed=0, needle=((10, 18), (40, 44))):
    """What prompts.build gives: `n` random tokens, and `n_script` more as the script."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (n + (n_script or 0),), generator=generator).tolist()
    return SimpleNamespace(
        regime="niah", seed=seed, text=" ".join(map(str, tokens[:n])), tokens=tuple(tokens[:n]),
        script=tuple(tokens[n:]) if n_script else None, params={"length": n},
        needle=tuple((a, b) for a, b in needle if b <= n),
    )  # fmt: skip
