"""How sure a number is: intervals over prompts, permutation p-values, multiplicity, and curves nobody extrapolates.

The unit of analysis is the prompt (one generation). Heads and steps of one generation are not independent, so every
interval here resamples whole prompts; below five of them an estimate calls itself descriptive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import binomtest, norm
from statsmodels.stats.multitest import multipletests, multitest_alias
from statsmodels.stats.proportion import proportion_confint

from wakekv.errors import InputError, lookup

ENOUGH = 5  # prompts below which an interval describes the sample and claims nothing beyond it
RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """One number with its interval. `n` counts `unit`s; lo and hi are nan where no interval exists."""

    value: float
    lo: float
    hi: float
    n: int
    unit: str
    method: str

    @property
    def descriptive(self) -> bool:
        """Too few units to speak of anything but themselves."""
        return self.n < ENOUGH

    def row(self) -> dict:
        """As columns of a table: estimate, lo, hi, n, unit, method, descriptive."""
        cells = asdict(self)
        return {"estimate": cells.pop("value"), **cells, "descriptive": self.descriptive}

    def __str__(self) -> str:
        if not np.isfinite(self.value):
            return f"undefined (n = {self.n} {self.unit})"
        between = f" [{self.lo:.3g}, {self.hi:.3g}]" if np.isfinite(self.lo) else ""
        return f"{self.value:.3g}{between} (n = {self.n} {self.unit}{', descriptive' if self.descriptive else ''})"


def bootstrap(
    sums: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    unit: str = "prompts",
) -> Estimate:
    """A statistic of sums over prompts, with a percentile interval from resampling whole prompts with replacement.

    sums: [prompt, column], what each prompt adds up to. statistic: [..., column] totals -> [...] values, e.g. the ratio
    of two columns (the ratio-of-sums estimator). Resamples where the statistic is undefined (0/0) are left out, and
    `method` says how many. One prompt: no interval. Seeded by `numpy.random.SeedSequence(seed)`; no global state.
    """
    sums = np.asarray(sums, float)
    if sums.ndim != 2 or not len(sums):
        raise InputError(f"bootstrap needs sums as [prompt, column] with at least one prompt, got shape {sums.shape}")
    if np.isnan(sums).any():
        raise InputError("bootstrap got a sum that is nan: leave out what is undefined, and count it, before summing")
    if not (isinstance(resamples, int | np.integer) and resamples >= 1 and 0 < level < 1):
        raise InputError(f"an interval takes a whole number of resamples and a level in 0..1, not {resamples}, {level}")
    n = len(sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(sums.sum(0)))
        if n == 1 or not np.isfinite(value):
            why = "one prompt, no interval" if np.isfinite(value) else "undefined: nothing to count"
            return Estimate(value, np.nan, np.nan, n, unit, why)
        rng = np.random.default_rng(np.random.SeedSequence(seed))
        drawn = rng.multinomial(n, np.full(n, 1 / n), size=resamples)
        values = statistic(drawn @ sums)
    values = values[np.isfinite(values)]
    lo, hi = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    lost = f", {resamples - len(values)} undefined" if len(values) < resamples else ""
    method = f"percentile bootstrap over {unit}, {resamples} resamples{lost}, {level:.0%}"
    return Estimate(value, float(lo), float(hi), n, unit, method)


def ratio(over: Sequence[float], under: Sequence[float], **how) -> Estimate:
    """sum(over) / sum(under) with `bootstrap`'s interval. over, under: [prompt]. InputError for two lengths."""
    if np.shape(over) != np.shape(under):
        raise InputError(f"a ratio needs one shape over and under the line, got {np.shape(over)} and {np.shape(under)}")
    return bootstrap(np.column_stack([over, under]), lambda total: total[..., 0] / total[..., 1], **how)


def mean(values: Sequence[float], **how) -> Estimate:
    """The mean over prompts of one value per prompt, with `bootstrap`'s interval. nan is dropped; n is what is left."""
    kept = np.asarray(values, float)
    kept = kept[~np.isnan(kept)]
    if not len(kept):
        return Estimate(np.nan, np.nan, np.nan, 0, how.get("unit", "prompts"), "undefined: nothing to count")
    return ratio(kept, np.ones(len(kept)), **how)


def proportion(count: int, n: int, *, unit: str, level: float = LEVEL) -> Estimate:
    """count / n of independent units, with Wilson's interval (statsmodels)."""
    if not 0 <= count <= n < np.inf:
        raise InputError(f"a proportion needs 0 <= count <= n, both finite, got {count} of {n}")
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan, 0, unit, "undefined: nothing to count")
    lo, hi = proportion_confint(count, n, alpha=1 - level, method="wilson")
    return Estimate(count / n, float(lo), float(hi), int(n), unit, f"Wilson, {level:.0%}")


def permutation_p(observed: float, null: Sequence[float]) -> float:
    """(1 + #{null >= observed}) / (n + 1): one-sided, never zero. Raises InputError on an empty or undefined null."""
    null = np.asarray(null, float)
    if not null.size or np.isnan(null).any() or np.isnan(observed):
        raise InputError("a permutation p-value needs an observed value and a null without nan, at least one draw")
    return float((1 + np.sum(null >= observed)) / (null.size + 1))


@dataclass(frozen=True)
class SignTest:
    """Wins and losses over prompts; ties take no side. p: two-sided binomial, nan if every prompt is a tie."""

    wins: int
    ties: int
    losses: int
    p: float


def sign_test(differences: Sequence[float], tie: float = 0.0) -> SignTest:
    """Sign test over prompts. differences: [prompt], positive = a win; |difference| <= tie is a tie."""
    differences = np.asarray(differences, float)
    if np.isnan(differences).any():
        raise InputError("a sign test got a difference that is nan: leave that prompt out and say so")
    if differences.ndim != 1 or not tie >= 0:
        raise InputError(
            f"a sign test takes a difference a prompt and a tie of at least 0, got {differences.shape}, {tie}"
        )
    wins, losses = int(np.sum(differences > tie)), int(np.sum(differences < -tie))
    p = float(binomtest(wins, wins + losses).pvalue) if wins + losses else np.nan
    return SignTest(wins, len(differences) - wins - losses, losses, p)


@dataclass(frozen=True)
class Adjusted:
    """p-values corrected for a family of tests, [test]; nan where the raw one was."""

    p: np.ndarray
    reject: np.ndarray
    family: int
    n_undefined: int
    method: str


def adjust(p: Sequence[float], method: str = "bonferroni", alpha: float = 0.05, family: int | None = None) -> Adjusted:
    """Corrects p-values after setting undefined ones aside (statsmodels would answer nan for all of them).

    method: any of statsmodels' `multipletests`; family: a larger number of tests than is at hand (Bonferroni only).
    """
    p = np.asarray(p, float)
    known = ~np.isnan(p)
    lookup(method, multitest_alias, "correction")
    if not ((p[known] >= 0) & (p[known] <= 1)).all():
        raise InputError("a p-value lies outside 0..1: give p-values, not statistics")
    n, size = int(known.sum()), int(known.sum()) if family is None else family
    if size < n or (size > n and method != "bonferroni"):
        raise InputError(f"a family of {size} tests cannot correct {n} p-values by {method!r}")
    corrected = np.full(p.shape, np.nan)
    if n and method == "bonferroni":
        corrected[known] = np.minimum(1.0, p[known] * size)
    elif n:
        corrected[known] = multipletests(p[known], alpha=alpha, method=method)[1]
    return Adjusted(corrected, corrected <= alpha, size, len(p) - n, method)


def two_proportions(hits_a, n_a, hits_b, n_b) -> np.ndarray:
    """One-sided p that rate a exceeds rate b: the pooled two-proportion z-test, vectorised; nan where undefined."""
    hits_a, n_a, hits_b, n_b = (np.asarray(x, float) for x in (hits_a, n_a, hits_b, n_b))
    with np.errstate(divide="ignore", invalid="ignore"):
        pooled = (hits_a + hits_b) / (n_a + n_b)
        z = (hits_a / n_a - hits_b / n_b) / np.sqrt(pooled * (1 - pooled) * (1 / n_a + 1 / n_b))
    return norm.sf(np.where(np.isfinite(z), z, np.nan))


def interpolate(x, known_x, known_y) -> np.ndarray:
    """Linear interpolation that refuses what `numpy.interp` lets pass: unsorted or repeated x, nan, x outside."""
    known_x, known_y, x = (np.asarray(a, float) for a in (known_x, known_y, x))
    if known_x.ndim != 1 or known_x.shape != known_y.shape or not known_x.size:
        raise InputError(f"interpolation needs x and y of one length, got {known_x.shape} and {known_y.shape}")
    if np.isnan(known_x).any() or np.isnan(known_y).any() or np.isnan(x).any():
        raise InputError("interpolation got a nan: drop undefined points first")
    if (np.diff(known_x) <= 0).any():
        raise InputError("interpolation needs strictly increasing x: sort the points and merge those that repeat")
    outside = (x < known_x[0]) | (x > known_x[-1])
    if outside.any():
        first = float(np.atleast_1d(x)[np.atleast_1d(outside)][0])
        raise InputError(f"x = {first:g} lies outside [{known_x[0]:g}, {known_x[-1]:g}]: nothing is extrapolated here")
    return np.interp(x, known_x, known_y)


@dataclass(frozen=True)
class Area:
    """Signed area between two curves, a minus b, over the x range both cover. mean: the area divided by that range."""

    area: float
    mean: float
    lo: float
    hi: float


def area_between(x_a, y_a, x_b, y_b) -> Area:
    """Exact area between two piecewise linear curves over their common x range; InputError where there is none."""
    x_a, x_b = np.asarray(x_a, float), np.asarray(x_b, float)
    if not x_a.size or not x_b.size:
        raise InputError("the area between two curves needs at least one point on each")
    lo, hi = max(x_a[0], x_b[0]), min(x_a[-1], x_b[-1])
    if not lo < hi:
        ranges = f"one covers [{x_a[0]:g}, {x_a[-1]:g}], the other [{x_b[0]:g}, {x_b[-1]:g}]"
        raise InputError(f"the curves share no range: {ranges}")
    knots = np.union1d(x_a, x_b)
    knots = np.union1d(knots[(knots >= lo) & (knots <= hi)], [lo, hi])
    area = float(np.trapezoid(interpolate(knots, x_a, y_a) - interpolate(knots, x_b, y_b), knots))
    return Area(area, area / (hi - lo), float(lo), float(hi))
