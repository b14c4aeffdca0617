"""Two policies at equal memory or equal budget, without dropping a point.

At one nominal budget policies hold different memory, so a comparison fixes memory first. *Step* matching (ours) takes
our policy at its largest realised memory that is not above the other's; every budget was simulated, so nothing is
interpolated. *Linear* matching is the paper's (section 5.1): our curve, between its points, at the other's memory.
*Budget* matching compares at the same nominal budget. A point that cannot be matched is listed with the reason, and
with how it would have gone against the nearest end of our curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wakekv.errors import InputError, lookup
from wakekv.simulation.replay import Curves
from wakekv.stats import SignTest, interpolate, sign_test


@dataclass(frozen=True)
class Curve:
    """A policy's cost: budgets int [point], memory float [point], rate float [point].

    memory: mean resident pages, summed over heads. rate: missed wants over wants.
    grain: the miss rate of a single miss; differences below it are ties. 0 for published, rounded numbers.
    """

    label: str
    budgets: np.ndarray
    memory: np.ndarray
    rate: np.ndarray
    grain: float = 0.0

    def __post_init__(self):
        if not len(self.budgets) == len(self.memory) == len(self.rate) > 0:
            raise InputError(f"the curve {self.label!r} needs as many budgets as memories and rates, and at least one")
        if not (np.isfinite(self.memory).all() and np.isfinite(self.rate).all()):
            raise InputError(f"the curve {self.label!r} has a point that is not a number: leave it out")
        if (np.diff(self.memory) < -1e-9).any():
            raise InputError(f"the curve {self.label!r} must not lose memory as its budget grows")

    def at(self, budgets: Iterable[int]) -> Curve:
        """The points at some budgets; those that it does not have are left out."""
        keep = np.isin(self.budgets, list(budgets))
        return Curve(self.label, self.budgets[keep], self.memory[keep], self.rate[keep], self.grain)


def pooled(label: str, prompts: Sequence[Curves]) -> Curve:
    """One combination's curve from its prompts: misses over wants of all, memory averaged, at budgets all have."""
    if not prompts:
        raise InputError(f"no log to make the curve {label!r} of")
    budgets = prompts[0].budgets
    for one in prompts[1:]:
        budgets = np.intersect1d(budgets, one.budgets)
    cut = [one.at(budgets) for one in prompts]
    n_wants = sum(one.n_wants for one in cut)
    misses = sum(one.misses for one in cut)
    return Curve(label, budgets, np.mean([one.mean_pages for one in cut], axis=0), misses / n_wants, 1.0 / n_wants)


def published(data: dict, combination: str, policy: str) -> Curve:
    """A curve of the paper (Table 3; memory of the other policies from the authors' run logs).

    Raises InputError for an unknown combination or policy, or one whose memory was not published.
    """
    rows = lookup(combination, data["table3_sweep"]["rows"], "combination")
    if policy not in rows[0]:
        raise InputError(f"no published miss rates of {policy!r}")
    if policy in ("reactive", "evict"):
        memory = [row["reactive_mean_pages"] for row in rows]
    else:
        memory = data["realised_memory_pages"].get(combination, {}).get(policy)
        if memory is None:
            raise InputError(f"the memory of {policy} on {combination} was not published")
    budgets, rate = (np.array([row[key] for row in rows]) for key in ("budget_pages", policy))
    return Curve(f"{policy} (published)", budgets, np.array(memory, float), rate)


@dataclass(frozen=True)
class Point:
    """One comparison. margin = the other's miss rate minus ours: positive is a win for us. nan if there is no match."""

    budget: int
    memory: float
    rate: float
    our_memory: float
    our_rate: float
    grain: float
    reason: str = ""

    @property
    def margin(self) -> float:
        return self.rate - self.our_rate

    @property
    def verdict(self) -> str:
        """win, tie (less than one miss apart, or equal as published) or loss; "excluded" where nothing matches."""
        if self.reason:
            return "excluded"
        if abs(self.margin) < max(self.grain, 1e-12):
            return "tie"
        return "win" if self.margin > 0 else "loss"


def step(ours: Curve, other: Curve) -> list[Point]:
    """Ours at its largest realised memory not above the other's, point by point."""
    points = []
    for i in range(len(other.budgets)):
        j = np.searchsorted(ours.memory, other.memory[i] * (1 + 1e-12), side="right") - 1
        reason = "" if j >= 0 else "it holds less than ours at its smallest budget"
        points.append(_point(ours, other, i, ours.memory[max(j, 0)], ours.rate[max(j, 0)], reason))
    return points


def linear(ours: Curve, other: Curve) -> list[Point]:
    """Ours interpolated at the other's memory, nowhere extrapolated: the paper's way."""
    rising = np.concatenate([np.diff(ours.memory) > 1e-9, [True]])  # of points with one memory, the last
    memory, rate = ours.memory[rising], ours.rate[rising]
    points = []
    for i, m in enumerate(other.memory):
        if m < memory[0]:
            points.append(_point(ours, other, i, memory[0], rate[0], "it holds less than ours at its smallest budget"))
        elif m > memory[-1]:
            points.append(_point(ours, other, i, memory[-1], rate[-1], "it holds more than ours ever does"))
        else:
            points.append(_point(ours, other, i, m, float(interpolate(m, memory, rate)), ""))
    return points


def budget(ours: Curve, other: Curve) -> list[Point]:
    """Both at the same nominal budget."""
    points = []
    for i, b in enumerate(other.budgets):
        j = int(np.argmin(np.abs(ours.budgets - b)))
        reason = "" if ours.budgets[j] == b else "ours was not simulated at this budget"
        points.append(_point(ours, other, i, ours.memory[j], ours.rate[j], reason))
    return points


def _point(ours, other, i, our_memory, our_rate, reason) -> Point:
    grain = max(ours.grain, other.grain)
    return Point(
        int(other.budgets[i]),
        float(other.memory[i]),
        float(other.rate[i]),
        float(our_memory),
        float(our_rate),
        grain,
        reason,
    )


@dataclass(frozen=True)
class Tally:
    """How a set of comparisons went. Ties count for neither side; the paper's "at most" counts them with the wins."""

    points: tuple[Point, ...]

    def count(self, verdict: str) -> int:
        return sum(p.verdict == verdict for p in self.points)

    @property
    def matched(self) -> int:
        return len(self.points) - self.count("excluded")

    @property
    def at_most(self) -> int:
        """Points at which our miss rate is at most the other's: the count the paper reports."""
        return self.count("win") + self.count("tie")

    @property
    def smallest_margin(self) -> Point | None:
        """The matched point at which we win by the least, or lose by the most."""
        matched = [p for p in self.points if p.verdict != "excluded"]
        return min(matched, key=lambda p: p.margin) if matched else None

    @property
    def excluded(self) -> list[Point]:
        return [p for p in self.points if p.verdict == "excluded"]

    @property
    def excluded_losses(self) -> int:
        """Excluded points that would be losses if the nearest end of our curve were taken."""
        return sum(p.margin < 0 for p in self.excluded)

    def row(self) -> dict:
        """As columns of a table."""
        least = self.smallest_margin
        return {
            "wins": self.count("win"), "ties": self.count("tie"), "losses": self.count("loss"), "matched": self.matched,
            "excluded": len(self.excluded), "excluded_losses": self.excluded_losses,
            "smallest_margin": np.nan if least is None else least.margin,
            "at_budget": np.nan if least is None else least.budget,
        }  # fmt: skip


def tally(points: Iterable[Point]) -> Tally:
    """Counts over any set of comparisons. Points of one curve are not independent trials: see `over_prompts`."""
    return Tally(tuple(points))


def over_prompts(per_prompt: Sequence[Tally]) -> SignTest:
    """Sign test over prompts, the unit of analysis: a prompt is won if its margins, averaged over points, are positive.

    Prompts with no matched point take no side and are left out; InputError if none is left.
    """
    margins = []
    for one in per_prompt:
        matched = [p for p in one.points if p.verdict != "excluded"]
        if matched:
            mean = float(np.mean([p.margin for p in matched]))
            margins.append(0.0 if abs(mean) < matched[0].grain else mean)
    if not margins:
        raise InputError("no prompt has a matched point, so there is nothing to test")
    return sign_test(margins)


METHODS = {"step": step, "linear": linear, "budget": budget}
