"""Profiles: which logs a run needs and how much it computes: minutes, the study, or the paper's own models."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}  # for logs whose text is "sampled"


@dataclass(frozen=True)
class Log:
    """One generation to be logged. `steps` is the most it may take; a script or an end token may end it sooner."""

    model: str
    regime: str
    seed: int
    steps: int
    depth: float | None = None  # niah: where in the filler the needle lies, 0..1
    length: int | None = None  # tokens of the prompt (niah, multiturn); None: the regime's own
    text: str = "scripted"  # scripted | greedy | sampled

    @property
    def name(self) -> str:
        depth = "" if self.depth is None else f"_d{round(100 * self.depth):02d}"
        return f"{self.model}_{self.regime}{depth}_s{self.seed}" + ("" if self.text == "scripted" else f"_{self.text}")


@dataclass(frozen=True)
class Profile:
    """What one run records and how much it computes. `model` is the one that figures show first."""

    name: str
    about: str
    model: str
    logs: tuple[Log, ...]
    budgets: tuple[int, ...]  # pages per head at which tables quote the curves
    resamples: int  # of prompts, for intervals
    shuffles: int  # for null distributions
    workers: int = 2  # recordings at a time, each with one thread
    device: str = "auto"
    dtype: str = "auto"


def _smoke() -> tuple[Log, ...]:
    model = "smollm2-135m"
    niah = [Log(model, "niah", seed, 40, depth, 800) for seed, depth in enumerate((0.25, 0.5, 0.75))]
    cot = [Log(model, "cot", seed, 60) for seed in (0, 1)]
    return (*niah, *cot, *(Log(model, "multiturn", seed, 60, length=1200) for seed in (0, 1)))


def _study(model: str, needles: list[tuple[float, int]]) -> list[Log]:
    logs = [Log(model, "niah", seed, 512, depth, 5000) for depth, seed in needles]
    logs += [Log(model, "cot", seed, 2048) for seed in range(5)]
    return logs + [Log(model, "multiturn", seed, 512) for seed in range(5)]


def _default() -> tuple[Log, ...]:
    small, greedy = "smollm2-135m", "greedy"
    logs = _study(small, [(depth, seed) for depth in (0.25, 0.5, 0.75) for seed in (0, 1, 2)])
    logs += _study("gemma3-270m", [(0.25, 0), (0.5, 1), (0.75, 2), (0.5, 3), (0.25, 4)])
    logs += [Log(small, "niah", 0, 256, 0.5, 5000, greedy)]
    return (*logs, Log(small, "cot", 0, 1024, text=greedy), Log(small, "multiturn", 0, 256, text=greedy))


def _full() -> tuple[Log, ...]:
    """The paper's five pairs of model and regime; lengths and steps as it states them, greedy."""
    logs = [Log(model, "niah", seed, 256, depth, 5000, "greedy") for model in ("qwen2.5-3b", "mistral-7b")
            for depth in (0.25, 0.5, 0.75) for seed in (0, 1, 2)]  # fmt: skip
    distilled = ("r1-distill-qwen-1.5b", "r1-distill-llama-8b")
    logs += [Log(model, "cot", seed, 2048, text="greedy") for model in distilled for seed in range(5)]
    return (*logs, *(Log("qwen2.5-3b", "multiturn", seed, 256, text="greedy") for seed in range(5)))


PROFILES = {
    "smoke": Profile(
        "smoke", "minutes: everything once, tiny; its numbers mean nothing", "smollm2-135m", _smoke(),
        budgets=(2, 4, 8, 16), resamples=200, shuffles=50,
    ),
    "default": Profile(
        "default", "the study on two cores: two small models, three regimes", "smollm2-135m", _default(),
        budgets=(8, 16, 32, 64), resamples=2000, shuffles=200,
    ),
    "full": Profile(
        "full", "the paper's models on a GPU of 24 GB, by hub name", "qwen2.5-3b", _full(),
        budgets=(8, 16, 32, 64), resamples=2000, shuffles=200, workers=1,
    ),
}  # fmt: skip
