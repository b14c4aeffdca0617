"""Does the token just emitted announce that heads are about to wake? (the paper's markers, section 2.2)

A wake-burst follows step s if at least `size` heads wake within (s, s + horizon]. Half of the steps propose markers:
each token id emitted at least five times is tested for a burst rate above that of all other tokens (one-sided
two-proportion z-test, Bonferroni over the ids tested). The other half judges those that survive. Where none do,
`detectable` says how large an effect would have been seen. Token ids only: whoever has the tokenizer can show the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import hypergeom
from statsmodels.stats.power import NormalIndPower

from wakekv import stats
from wakekv.errors import InputError
from wakekv.heads.grading import METRICS, Tally
from wakekv.heads.reads import Reads, label, poolable
from wakekv.heads.wakeups import QUIET, events

SEEN = 5  # times a token id must be emitted in the discovery half to be tested
ALPHA, POWER = 0.05, 0.8
DRAWS = 200


@dataclass(frozen=True, eq=False)
class Markers:
    """What one model and regime shows.

    tested: rows token, n, hits, rate, p, p_bonferroni, p_exact (Fisher, one-sided, uncorrected), marker; best first
    family: ids tested; base_rate: burst rate in the discovery half
    held_out: metric -> Estimate over prompts on the other half, for all markers together; {} without a marker
    by_chance: markers found in each of the draws that rotate every log's bursts against its text
    chance_p: permutation p of the smallest p-value among those rotations; it keeps how bursts follow each other, which
        the z-test takes to be independent
    detectable: the smallest burst rate that a token as frequent as the median (the commonest) tested one would have
        needed to be found with power 0.8; nan if even always would not do, or nothing was tested
    """

    tested: list[dict]
    family: int
    base_rate: float
    n_discovery: int
    held_out: dict[str, stats.Estimate]
    by_chance: np.ndarray
    chance_p: float
    detectable: dict[str, float]
    n_prompts: int

    @property
    def tokens(self) -> list[int]:
        """The ids that survived."""
        return [row["token"] for row in self.tested if row["marker"]]


def burst_follows(n_events: np.ndarray, horizon: int = 1, size: int = 1) -> np.ndarray:
    """bool [step - horizon]: at least `size` wake-ups within (s, s + horizon]. n_events: wake-ups per step, [step]."""
    if horizon < 1 or size < 1:
        raise InputError(f"a burst needs a horizon and a size of at least 1, not {horizon} and {size}")
    upto = np.concatenate([[0], np.cumsum(n_events)])
    return upto[horizon + 1 :] - upto[1:-horizon] >= size


def try_tokens(token: np.ndarray, burst: np.ndarray, seen: int = SEEN) -> list[dict]:
    """Rows for every id emitted at least `seen` times, best first. token int, burst bool: [step]."""
    ids, n = np.unique(token, return_counts=True)
    hits = np.bincount(np.searchsorted(ids, token), weights=burst, minlength=len(ids)).astype(int)
    ids, n, hits = (a[n >= seen] for a in (ids, n, hits))
    p = stats.two_proportions(hits, n, burst.sum() - hits, len(token) - n)
    corrected = stats.adjust(p, family=len(ids)).p
    exact = hypergeom.sf(hits - 1, len(token), int(burst.sum()), n)
    order = np.lexsort((ids, exact, np.where(np.isnan(p), 1.0, p)))
    return [
        {"token": int(ids[i]), "n": int(n[i]), "hits": int(hits[i]), "rate": float(hits[i] / n[i]), "p": float(p[i])}
        | {"p_bonferroni": float(corrected[i]), "p_exact": float(exact[i]), "marker": bool(corrected[i] <= ALPHA)}
        for i in order
    ]


def detectable_rate(n: int, rest: int, base_rate: float, family: int) -> float:
    """The smallest burst rate after a token seen n times that the test finds with power 0.8, against `rest` others.

    Bonferroni over `family`; Cohen's h, normal approximation (statsmodels). nan if no rate up to 1 is large enough.
    """
    if not (n and rest and family and 0 < base_rate < 1):
        return np.nan
    power = NormalIndPower()
    h = power.solve_power(nobs1=n, alpha=ALPHA / family, power=POWER, ratio=rest / n, alternative="larger")
    angle = np.arcsin(np.sqrt(base_rate)) + h / 2
    return float(np.sin(angle) ** 2) if angle <= np.pi / 2 else np.nan


def find_markers(
    many: Sequence[Reads],
    *,
    horizon: int = 1,
    size: int = 1,
    split: str = "steps",
    seen: int = SEEN,
    flagged: bool = False,
    draws: int = DRAWS,
    seed: int = 0,
) -> Markers:
    """Tests every emitted token of one model and regime.

    split "steps": the first half of each log discovers, its second half judges; "prompts": the first half of the logs
    discovers, the others judge. Steps that no wake-up can follow (it takes QUIET quiet ones first) are left out.
    Raises InputError for an unknown split, or a split of prompts with one log.
    """
    kept = poolable(many, flagged=flagged)
    if split not in ("steps", "prompts"):
        raise InputError(f"split must be 'steps' or 'prompts', not {split!r}")
    if split == "prompts" and len(kept) < 2:
        raise InputError("splitting by prompts needs at least two logs: pass split='steps' or record more")
    tokens, bursts = [], []
    for reads in kept:
        follows = burst_follows(events(reads.score).sum(0), horizon, size)[QUIET - 1 :]
        tokens.append(np.asarray(reads.trace.emitted)[QUIET - 1 :][: len(follows)])
        bursts.append(follows)
    if split == "steps":
        cuts = [len(b) // 2 for b in bursts]
        halves = [(slice(0, cut), slice(cut + horizon - 1, None)) for cut in cuts]  # no burst counted in both
    else:
        nothing, everything = slice(0, 0), slice(None)
        early = (len(kept) + 1) // 2
        halves = [(everything, nothing) if i < early else (nothing, everything) for i in range(len(kept))]
    pairs = list(zip(tokens, bursts, halves, strict=True))
    token = np.concatenate([t[first] for t, _, (first, _) in pairs])
    tested = try_tokens(token, np.concatenate([b[first] for _, b, (first, _) in pairs]), seen)
    found = [row["token"] for row in tested if row["marker"]]
    base = float(np.mean(np.concatenate([b[first] for _, b, (first, _) in pairs]))) if token.size else np.nan

    rng = np.random.default_rng(np.random.SeedSequence(seed))
    by_chance, best = np.zeros(draws, int), np.zeros(draws)
    for i in range(draws):
        rotated = [np.roll(b[first], rng.integers(max(1, len(b[first])))) for _, b, (first, _) in pairs]
        rows = try_tokens(token, np.concatenate(rotated), seen)
        by_chance[i], best[i] = sum(row["marker"] for row in rows), _smallest_p(rows)

    judged = [(t[second], b[second]) for t, b, (_, second) in pairs if b[second].size]
    counts = [row["n"] for row in tested]
    often = {"median": int(np.median(counts)), "commonest": max(counts)} if counts else {"median": 0, "commonest": 0}
    detectable = {k: detectable_rate(n, len(token) - n, base, len(tested)) for k, n in often.items()}
    chance_p = stats.permutation_p(-_smallest_p(tested), -best) if draws else np.nan
    held_out = _judge(judged, found, seed) if found and judged else {}
    return Markers(tested, len(tested), base, len(token), held_out, by_chance, chance_p, detectable, len(kept))


def _smallest_p(rows: list[dict]) -> float:
    return min((row["p"] for row in rows if not np.isnan(row["p"])), default=1.0)


def _judge(halves: list[tuple[np.ndarray, np.ndarray]], found: list[int], seed: int) -> dict[str, stats.Estimate]:
    """Precision, recall, F1, base rate and lift of "a marker was emitted" for "a burst follows", over prompts."""
    sums = []
    for token, burst in halves:
        said = np.isin(token, found)
        both = (said & burst).sum()
        sums.append(Tally(said.sum(), both, burst.sum(), both, burst.size, burst.sum(), 0.0))
    return {
        name: stats.bootstrap(np.array(sums, float), lambda t, of=of: of(Tally(*np.moveaxis(t, -1, 0))), seed=seed)
        for name, of in METRICS.items()
    }


def marker_table(many: Sequence[Reads], **how) -> list[dict]:
    """Rows model, regime, quantity, estimate, lo, hi, n, unit, method for `find_markers(many, **how)`."""
    found = find_markers(many, **how)
    model, regime = label(many[0].trace)
    prompts = found.n_prompts
    single = {
        "tokens_tested": (found.family, "ids emitted at least as often as asked, discovery half"),
        "markers": (len(found.tokens), "one-sided two-proportion z, Bonferroni over the ids tested, alpha 0.05"),
        "markers_exact": (
            sum(row["p_exact"] * found.family <= ALPHA for row in found.tested),
            "Fisher's exact test instead of z, Bonferroni over the ids tested, alpha 0.05",
        ),
        "markers_by_chance": (
            float(np.mean(found.by_chance)) if len(found.by_chance) else np.nan,
            f"mean over {len(found.by_chance)} rotations of the bursts against the text",
        ),
        "chance_p": (found.chance_p, "permutation p of the smallest p-value, same rotations"),
        "base_rate_discovery": (found.base_rate, "share of discovery steps that a burst follows"),
        "detectable_rate_median": (found.detectable["median"], "token of median frequency, power 0.8, Bonferroni"),
        "detectable_rate_commonest": (found.detectable["commonest"], "commonest token, power 0.8, Bonferroni"),
    }
    rows = {k: stats.Estimate(float(v), np.nan, np.nan, prompts, "prompts", m) for k, (v, m) in single.items()}
    none = stats.Estimate(np.nan, np.nan, np.nan, prompts, "prompts", "undefined: no marker to judge")
    rows |= {f"heldout_{name}": found.held_out.get(name, none) for name in METRICS}
    return [{"model": model, "regime": regime, "quantity": name, **e.row()} for name, e in rows.items()]
