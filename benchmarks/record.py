"""What logging costs: decode attention with and without it, timed in turn in one run.

A model of SmolLM2-135M's shape with random weights decodes from a context of random keys: neither the attention nor the
search for its top k takes longer for other numbers. Logged and unlogged steps alternate, in a whole model, so that its
other work sweeps the processor's caches as it does in a recording. `logged_over_unlogged` compares the time spent in
attention (all layers of a step, and for a logged step handing it over); `step_over_step` compares whole decode steps.

    python benchmarks/record.py [--context 5000] [--steps 60] [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import transformers

from wakekv.recording.attention import Reader

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
WARM_UP = 4  # pairs that are not counted


def measure(context: int, n_steps: int, k: int = 64, device: str = "cpu") -> dict[str, float]:
    """Median times and their ratios over `n_steps` pairs of an unlogged and a logged step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config).to(device).eval()
    needle = [[at, at + 20] for at in range(context // 8, context, context // 4)]
    reader = Reader(config.num_hidden_layers, context + 2 * (n_steps + WARM_UP), context, needle, k)
    attend, spent = reader.attend, [0.0]

    def timed(*args, **kwargs):
        start = now()
        result = attend(*args, **kwargs)
        spent[0] += now() - start
        return result

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    reader.attend = timed
    attention, step = {"plain": [], "step": []}, {"plain": [], "step": []}
    with torch.inference_mode(), reader.attached(model):
        for layer in reader.cache.layers:
            keys, values = torch.randn(2, 1, config.num_key_value_heads, context, config.head_dim, device=device)
            layer.update(keys, values)
        for pair in range(n_steps + WARM_UP):
            for mode in ("plain", "step") if pair % 2 else ("step", "plain"):
                reader.mode, spent[0], began = mode, 0.0, now()
                token = torch.tensor([[pair]], device=device)
                model(token, past_key_values=reader.cache)
                inside = now()
                if mode == "step":
                    reader.take()
                ended = now()
                attention[mode].append(spent[0] + ended - inside)
                step[mode].append(ended - began)
    times = {
        f"{what}_{mode}_s": statistics.median(t[mode][WARM_UP:])
        for what, t in (("attention", attention), ("whole", step))
        for mode in t
    }
    return {
        "logged_over_unlogged": times["attention_step_s"] / times["attention_plain_s"],
        "step_over_step": times["whole_step_s"] / times["whole_plain_s"],
        **times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=5000, help="tokens in the cache (default 5000)")
    parser.add_argument("--steps", type=int, default=60, help="pairs of steps (default 60)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {k: round(v, 5) for k, v in measure(args.context, args.steps, device=args.device).items()}
    result |= {"context": args.context, "steps": args.steps, "threads": args.threads, "device": args.device}
    print(json.dumps(result) if args.json else "\n".join(f"{name:24} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
