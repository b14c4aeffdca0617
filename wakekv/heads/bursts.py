"""Do heads wake together? Bursts of wake-ups over all heads, against nulls that say what they destroy.

Two nulls, 200 draws each. "shuffle" scatters each head's events uniformly and destroys everything but how often a head
wakes. "shift" rotates each head's events by a random offset and destroys the alignment across heads alone: it keeps a
head's own rhythm, so what exceeds it is heads waking together. Events cannot fall in the first QUIET steps, and neither
null puts any there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wakekv import stats
from wakekv.errors import InputError
from wakekv.heads.reads import Reads, label, poolable
from wakekv.heads.wakeups import ALARM, QUIET, events, zscores

SHARES = (0.02, 0.05)  # shares of steps that a coarse trigger may fire at
DRAWS = 200


def top_steps(per_step: np.ndarray, share: float) -> np.ndarray:
    """Events in the busiest `share` of steps (rounded up). per_step: [..., step] -> [...].

    Over all events this is the concentration, and the recall of the best coarse trigger there can be: one that
    knows the busiest steps in advance.
    """
    if not 0 < share <= 1:
        raise InputError(f"a share of steps lies in (0, 1], got {share}")
    busiest = np.ceil(share * per_step.shape[-1]).astype(int)
    return -np.sort(-per_step, axis=-1)[..., :busiest].sum(-1)


def fano(per_step: np.ndarray) -> np.ndarray:
    """Variance over mean of events per step, [..., step] -> [...]; 1 for a Poisson process, nan without events."""
    if not per_step.shape[-1]:
        return np.full(per_step.shape[:-1], np.nan)
    mean = per_step.mean(-1)
    return np.where(mean > 0, per_step.var(-1) / np.where(mean > 0, mean, 1), np.nan)


def shuffled(event: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Events per step, [step], with each head's events scattered uniformly over distinct steps. event: [head, step]."""
    n_steps, head = event.shape[1], np.nonzero(event)[0]
    step = rng.integers(n_steps, size=len(head)) if len(head) else head
    while len(head):
        again = np.ones(len(head), bool)
        again[np.unique(head * n_steps + step, return_index=True)[1]] = False
        if not again.any():
            break
        step[again] = rng.integers(n_steps, size=again.sum())  # that head already wakes there: draw until it does not
    return np.bincount(step, minlength=n_steps)


def shifted(event: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Events per step, [step], with each head's events rotated by its own random offset."""
    n_heads, n_steps = event.shape
    head, step = np.nonzero(event)
    return np.bincount((step + rng.integers(n_steps, size=n_heads)[head]) % n_steps, minlength=n_steps)


NULLS = {"shuffle": shuffled, "shift": shifted}


@dataclass(frozen=True, eq=False)
class Bursts:
    """One log's wake-ups per step, [step] from step QUIET on, and those of every draw of each null, [draw, step]."""

    per_step: np.ndarray
    null: dict[str, np.ndarray]


def bursts(event: np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> Bursts:
    """Pools the events of all heads, bool [head, step], and draws both nulls. Seeded."""
    event = event[:, QUIET:]
    wakers = event[event.any(1)]
    rngs = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(len(NULLS))]
    null = {
        name: np.array([draw(wakers, rng) for _ in range(draws)]).reshape(draws, event.shape[1])
        for (name, draw), rng in zip(NULLS.items(), rngs, strict=True)
    }
    return Bursts(event.sum(0), null)


def against(observed: float, null: np.ndarray) -> tuple[float, float]:
    """(z, p) of a value in its null: z describes, the permutation p decides. nan where there is nothing to judge."""
    if np.isnan(observed) or np.isnan(null).any() or not null.size:
        return np.nan, np.nan
    sd = null.std()
    return float((observed - null.mean()) / sd) if sd > 0 else np.nan, stats.permutation_p(observed, null)


def clock(n_steps: int, share: float) -> np.ndarray:
    """int [fired]: the steps at which a clock fires that may use `share` of the steps, as even as they get."""
    fires = np.ceil(share * n_steps).astype(int)
    return ((np.arange(fires) + 0.5) * n_steps / max(1, fires)).astype(int)


def after_most_alarms(n_alarms: np.ndarray, share: float) -> np.ndarray:
    """int [fired]: the steps right after the `share` of steps with the most alarms over all heads, n_alarms [step].

    The ranking is causal, the cut is not: it still knows how many alarms the busiest steps of the log will have.
    """
    fires = np.ceil(share * len(n_alarms)).astype(int)
    return np.argsort(-n_alarms[:-1], kind="stable")[:fires] + 1


def burst_table(many: Sequence[Reads], *, flagged: bool = False, draws: int = DRAWS, seed: int = 0) -> list[dict]:
    """Rows model, regime, quantity, share, estimate, lo, hi, n ..., null_mean, z and p for each null.

    coarse_recall: share of all wake-ups in the busiest 2 % (5 %) of each log's steps, an upper bound on any trigger
    that fires for all heads at once. random_trigger, periodic_trigger and signal_trigger fire at as many steps, namely
    blindly, by a clock, and right after the steps with most alarms. A null's mean shows how much of coarse_recall comes
    from picking the busiest steps after the fact. Steps count from QUIET on.
    """
    kept = poolable(many, flagged=flagged)
    model, regime = label(kept[0].trace)
    found = [bursts(events(reads.score), draws=draws, seed=seed + i) for i, reads in enumerate(kept)]
    n_alarms = [sum((z > ALARM).sum(0) for z in zscores(reads).values())[QUIET:] for reads in kept]
    total = np.array([b.per_step.sum() for b in found])
    rows = []

    def row(quantity, share, sums, null_sums=None):
        """sums: [prompt] numerators over `total`; null_sums: {null: [prompt, draw]}."""
        base = {"model": model, "regime": regime, "quantity": quantity, "share": share}
        base |= stats.ratio(sums, total, seed=seed).row() | {"n_events": int(total.sum())}
        base |= {"n_flagged": len(many) - len(kept)}
        for name in NULLS:
            pooled = np.sum(null_sums[name], axis=0) / max(1, total.sum()) if null_sums else np.zeros(0)
            z, p = against(base["estimate"], pooled)
            base |= {f"{name}_mean": float(pooled.mean()) if pooled.size else np.nan, f"{name}_z": z, f"{name}_p": p}
        rows.append(base)

    for share in SHARES:
        nulls = {name: [top_steps(b.null[name], share) for b in found] for name in NULLS}
        row("coarse_recall", share, [top_steps(b.per_step, share) for b in found], nulls)
        fired = [np.ceil(share * len(b.per_step)) / max(1, len(b.per_step)) for b in found]
        row("random_trigger", share, total * np.array(fired))
        row("periodic_trigger", share, [b.per_step[clock(len(b.per_step), share)].sum() for b in found])
        fires = [after_most_alarms(a, share) for a in n_alarms]
        row("signal_trigger", share, [b.per_step[f].sum() for b, f in zip(found, fires, strict=True)])
    # weighting each log's Fano factor by its events keeps one pooled number and its null on the same scale
    spread = [np.nan_to_num(fano(b.per_step)) * n for b, n in zip(found, total, strict=True)]
    nulls = {name: [np.nan_to_num(fano(b.null[name])) * n for b, n in zip(found, total, strict=True)] for name in NULLS}
    row("fano", None, spread, nulls)
    return rows


def per_log(many: Sequence[Reads], *, share: float = SHARES[0], draws: int = DRAWS, seed: int = 0) -> list[dict]:
    """One row a log: events, concentration in the busiest `share` of steps, Fano factor, z and p under each null."""
    rows = []
    for i, reads in enumerate(many):
        found = bursts(events(reads.score), draws=draws, seed=seed + i)
        n = int(found.per_step.sum())
        held = float(top_steps(found.per_step, share) / n) if n else np.nan
        cells = {"log": reads.name, "n_events": n, "share": share, "concentration": held}
        cells["fano"] = float(fano(found.per_step))
        for name in NULLS:
            null = top_steps(found.null[name], share) / n if n else np.zeros(0)
            cells[f"{name}_z"], cells[f"{name}_p"] = against(held, null)
        rows.append(cells)
    return rows
