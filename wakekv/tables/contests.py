"""Contests: our policy against another at equal memory or budget, pooled and prompt by prompt.

What Table 1, Table 3, Figure 1a and the claims about them are made of. A point of a curve is no independent trial:
counts of points are given because the paper counts points, and tests are over prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import lookup
from wakekv.policies import POLICIES, Policy
from wakekv.simulation import match
from wakekv.simulation.match import Tally
from wakekv.simulation.replay import Curves
from wakekv.simulation.study import Study

OURS = "reactive"
CITED = ("snapkv", "rkv", "reasonalloc")
SEVEN = ("full", "frozen", OURS, "evict", *CITED)  # Table 3's
EVERY_8 = {  # the pruning interval that the paper's Mistral-7B/NIAH needed
    f"{name}-every-8": POLICIES[name].but(every=8) for name in ("rkv", "reasonalloc")
}
MATCHED = {"frozen": ("step", "linear"), "evict": ("budget",)} | dict.fromkeys(CITED, ("step", "linear"))
SURVEY = {  # the systems of Figure 1a, and what they are measured against, by the names that the papers give them
    "duoattention": "DuoAttention", "razorattention": "RazorAttention", "moa": "MoA", "headkv": "HeadKV",
    "frozen": "frozen (the paper's foil)", "flexicache": "FlexiCache", "heterocache": "HeteroCache",
    "snapkv": "SnapKV", "adakv": "Ada-KV", "cake": "CAKE", "lava": "LAVa", "dynamickv": "DynamicKV",
    "pyramidkv": "PyramidKV", "evict": "evict (the paper's foil)", "rkv": "R-KV", "reasonalloc": "ReasonAlloc",
    "gkv": "G-KV", "thinkv": "ThinKV", "scope": "SCOPE", "h2o": "H2O", "streamingllm": "StreamingLLM",
    "quest": "Quest", "arkvale": "ArkVale", "shadowkv": "ShadowKV", "infinigen": "InfiniGen",
    "headinfer": "HeadInfer", OURS: "reactive (WakeKV)", "optimum": "optimum (knows the future)",
}  # fmt: skip
NAMES = SURVEY | {  # and what stands beside them; a policy of one's own goes by its own name
    "rkv-every-8": "R-KV, every 8 steps", "reasonalloc-every-8": "ReasonAlloc, every 8 steps",
}  # fmt: skip


def short(policy: str) -> str:
    """The name of a policy for people, without what stands in brackets after it."""
    return NAMES.get(policy, policy).split(" (")[0]


@dataclass(frozen=True)
class Contest:
    """How ours did against one other policy over the prompts of one model and regime.

    pooled   comparisons of the two pooled curves, a point a budget;  prompts  the same for each prompt's own curves
    margin   mean over prompts of the mean margin (the other's miss rate less ours), with its interval over prompts
    sign     sign test over prompts, None where no prompt has a matched point
    reason   why the other has no number to compare; "" if it has
    """

    pooled: Tally
    prompts: tuple[Tally, ...]
    margin: stats.Estimate
    sign: stats.SignTest | None
    reason: str = ""

    def row(self) -> dict:
        """As columns of a table."""
        sign = self.sign or stats.SignTest(0, 0, 0, np.nan)
        return self.pooled.row() | {
            "prompts_won": sign.wins, "prompts_tied": sign.ties, "prompts_lost": sign.losses, "p": sign.p,
            "margin": self.margin.value, "lo": self.margin.lo, "hi": self.margin.hi, "n": self.margin.n,
            "method": self.margin.method, "reason": self.reason,
        }  # fmt: skip


def contest(
    ours: Sequence[Curves],
    other: Sequence[Curves],
    method: str = "step",
    budgets: Iterable[int] | None = None,
    resamples: int = stats.RESAMPLES,
) -> Contest:
    """Ours against another, a Curves a prompt of each, matched by `method` at the other's `budgets` (None: all).

    Budgets beyond the pages of a log are left out: there every policy keeps everything. InputError if none is left.
    """
    matching = lookup(method, match.METHODS, "way of matching")

    def compared(ours: Sequence[Curves], other: Sequence[Curves]) -> Tally:
        theirs = match.pooled("other", other)
        return match.tally(matching(match.pooled("ours", ours), theirs if budgets is None else theirs.at(budgets)))

    prompts = tuple(compared([a], [b]) for a, b in zip(ours, other, strict=True))
    means = [np.mean(margins) if (margins := matched_margins(one)) else np.nan for one in prompts]
    matched = any(matched_margins(one) for one in prompts)
    return Contest(
        compared(ours, other),
        prompts,
        stats.mean(means, resamples=resamples),
        match.over_prompts(prompts) if matched else None,
        withheld(other),
    )


def method_of(policy: str) -> str:
    """How a policy is matched where one way must do: by budget if it holds what reactive holds, else by step."""
    return MATCHED.get(policy, ("step",))[0]


def matched_margins(tally: Tally) -> list[float]:
    return [p.margin for p in tally.points if p.verdict != "excluded"]


def withheld(prompts: Sequence[Curves]) -> str:
    """Why a policy has no miss rate at equal memory on these logs; "" if it has one."""
    policy, steps = prompts[0].policy, max(one.n_steps for one in prompts)
    for number, what in ("misses", "misses"), ("mean_pages", "memory"):
        if number in policy.withheld:
            return f"no {what}: {policy.withheld[number]}"
    if not policy.reversible and policy.start == "demand" and policy.every > steps:
        return f"prunes every {policy.every} steps, and no log here has more than {steps}: it never gave up a page"
    return ""


def against(study: Study, other: str, method: str, budgets: Iterable[int], resamples: int = stats.RESAMPLES) -> Contest:
    """`contest` of reactive against one policy of a study."""
    ours, theirs = (lookup(name, study.curves, "policy of this study") for name in (OURS, other))
    return contest(ours, theirs, method, budgets, resamples)


def together(contests: Iterable[Contest]) -> Tally:
    """All points of several contests, as the paper pools them."""
    return match.tally(point for one in contests for point in one.pooled.points)


def published(data: Mapping, others: Sequence[str], method: str) -> Tally:
    """The paper's own tables through our matching: every combination whose memory is published."""
    points = []
    for combination in data["table3_sweep"]["rows"]:
        for other in others:
            if other == "evict" or other in data["realised_memory_pages"].get(combination, {}):
                two = (match.published(data, combination, name) for name in (OURS, other))
                points += match.METHODS[method](*two)
    return match.tally(points)


def survey(chosen: Sequence[Study], budgets: Sequence[int], resamples: int = stats.RESAMPLES) -> pd.DataFrame:
    """Every policy of the studies at reactive's memory, a row a policy and study: where it stands on Figure 1a's axes,
    its margin with interval, or why it has none.

    when: offline, prefill or decode, that is when a head's role is decided or, without roles, its pages are chosen;
    gives_up: recoverable or destroyed. calibrated: "other prompts", "this prompt" (an upper bound) or "".
    miss_rate, pages, fetched: at the largest budget given that the logs have, nan where withheld.
    """
    rows = []
    for study in chosen:
        at = max([b for b in budgets if b <= study.n_pages], default=study.n_pages)
        for name, prompts in study.curves.items():
            rule, found = prompts[0].policy, contest(study.curves[OURS], prompts, "step", budgets, resamples)
            row = found.row() if not found.reason else {"reason": found.reason}
            here = [one.at(at) for one in prompts]
            wants = sum(one.n_wants for one in here)
            numbers = {
                "miss_rate": ("misses", sum(one.misses[0] for one in here) / wants),
                "pages": ("mean_pages", np.mean([one.mean_pages[0] for one in here])),
                "fetched": ("fetched", sum(one.fetched[0] for one in here) / wants),
            }
            numbers = {what: np.nan if key in rule.withheld else value for what, (key, value) in numbers.items()}
            place = {"when": rule.when, "gives_up": "recoverable" if rule.reversible else "destroyed"}
            place |= {"roles": rule.roles, "calibrated": calibrated(rule), "source": rule.source}
            study_of = {"model": study.model, "regime": study.regime, "head_unit": study.unit}
            rows.append({"policy": name, **place, **study_of, "budget": at, **numbers, **row})
    return pd.DataFrame(rows)


def calibrated(rule: Policy) -> str:
    """On what a policy that is calibrated was: "this prompt" makes it an upper bound."""
    return "this prompt" if rule.offline else "other prompts" if rule.roles == "offline" else ""


def claim_values(chosen: Sequence[Study], budgets: Sequence[int]) -> dict[str, dict]:
    """What `claims.decide` is given for each claim about matched comparisons, by the claim's id.

    Counts are those of pooled points under the matching that drops the fewest: by step, or by budget against evict.
    """
    whose = {"n": sum(s.n_prompts for s in chosen), "model": ", ".join(dict.fromkeys(s.model for s in chosen))}
    found = {}
    counted = {"frozen-17-of-17": "frozen", "evict-19-of-20": "evict"} | {f"{name}-matched": name for name in CITED}
    for claim, other in counted.items():
        contests = [against(study, other, method_of(other), budgets) for study in chosen]
        total = together(one for one in contests if not one.reason)
        why = next((one.reason for one in contests if one.reason), "nothing can be matched")
        found[claim] = {"value": f"{total.at_most}/{total.matched}", **whose} if total.matched else {"note": why}
    counts = [found[f"{name}-matched"].get("value", "0/0").split("/") for name in CITED]
    won, of = (sum(map(int, column)) for column in zip(*counts))
    found["cited-32-of-32"] = {"value": f"{won}/{of}", **whose} if of else found["rkv-matched"]
    lines = together(against(study, "frozen", "linear", budgets) for study in chosen)
    found["dropped-3-of-20"] = {"value": f"{len(lines.excluded)}/{len(lines.points)}", **whose}
    found["cited-memory"] = _most_memory(chosen, budgets) | whose
    both = [name for name in SURVEY if name != OURS and POLICIES[name].reversible and POLICIES[name].roles == "decode"]
    found["none-both"] = {"value": len(both), "n": len(SURVEY) - 2, "unit": "systems", "note": ", ".join(both)}
    cot = [study for study in chosen if study.regime == "cot"]
    for claim, other, at in ("evict-exception", "evict", 0), ("rkv-example", "rkv", len(budgets) - 2):
        inside = [b for b in budgets if cot and b <= cot[0].n_pages]
        found[claim] = ratio_at(cot[0], other, inside[min(at, len(inside) - 1)]) if inside else {"note": "no cot log"}
    return found


def _most_memory(chosen: Sequence[Study], budgets: Sequence[int]) -> dict:
    """The most memory that one of the cited holds, in reactive's at the same budget."""
    ratios = {}
    for study in chosen:
        for name in CITED:
            ours, theirs = study.curve(OURS), study.curve(name)
            shared = [b for b in budgets if b in ours.budgets and b in theirs.budgets]
            for b in shared:
                ratio = theirs.at([b]).memory[0] / ours.at([b]).memory[0]
                ratios[ratio] = f"{SURVEY[name]} on {study.name} at B = {b}"
    if not ratios:
        return {"note": "no budget that all of them have"}
    return {"value": float(max(ratios)), "note": ratios[max(ratios)]}


def ratio_at(study: Study, other: str, budget: int) -> dict:
    """Reactive's misses over the other's, at the other's memory for one budget, with the interval over prompts."""
    duel = against(study, other, method_of(other), [budget])
    points = [tally.points[0] for tally in duel.prompts if tally.matched]
    wants = [one.n_wants for one, tally in zip(study.curves[OURS], duel.prompts) if tally.matched]
    if duel.reason or not points or not sum(p.rate for p in points):
        return {"note": duel.reason or f"{other} misses nothing at B = {budget}"}
    over, under = ([getattr(p, what) * n for p, n in zip(points, wants)] for what in ("our_rate", "rate"))
    ratio = stats.ratio(over, under)
    ends = {end: value for end, value in (("lo", ratio.lo), ("hi", ratio.hi)) if np.isfinite(value)}
    note = f"{study.name}, at {np.mean([p.memory for p in points]):,.0f} pages (B = {budget})"
    return {"value": ratio.value, **ends, "n": ratio.n, "model": study.model, "note": note}
