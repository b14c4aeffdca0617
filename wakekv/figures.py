"""The figures and tables, by name. To add one: a function (drawing/, tables.py, measured.py) and a line below.

Each figure function draws one Picture and each table function makes one Table; both save themselves as files that are
equal bytes on every run, the numbers as CSV beside them. Nothing is drawn on a screen: no backend is chosen or changed.
"""

from __future__ import annotations

from collections.abc import Callable

from wakekv.drawing.beyond import gap_closed, pool_map, pool_price
from wakekv.drawing.cache import cost_growth, equal_memory, needle_map, stall_price, step_parts, ten_steps
from wakekv.drawing.churn import drift_settings, head_pages, spells, table_4, wakers
from wakekv.drawing.claims import claims_beside, verdict_table
from wakekv.drawing.foresight import burst_steps, prefetch_yield, token_markers
from wakekv.drawing.matched import figure_1a, margins
from wakekv.drawing.mechanism import mechanism
from wakekv.drawing.picture import POLICY_STYLE, Picture
from wakekv.drawing.policies import miss_curves, miss_map
from wakekv.drawing.reading import needle_scores, one_head
from wakekv.drawing.scale import scale_growth
from wakekv.drawing.scheduling import fairness, load_curves, request_waits, said_and_came, taught_orders
from wakekv.drawing.serving import engine_front, engine_growth, engine_parts
from wakekv.drawing.tiers import first_token, tier_answers, tier_codes, tier_memory, tier_sharing, tier_sweep
from wakekv.drawing.wakeups import alarms, forest, leads, mirage
from wakekv.learning import taught
from wakekv.scheduling import tables as scheduling
from wakekv.tables import Table, gained, logs, measured, sweep, tiered, twins, variants
from wakekv.tables.matched import headline, sensitivity, seven, systems

__all__ = [
    "FIGURES", "POLICY_STYLE", "TABLES", "Picture", "Table",
    "alarms", "burst_steps", "claims_beside", "cost_growth", "drift_settings", "engine_front", "engine_growth",
    "engine_parts", "equal_memory", "fairness", "figure_1a", "first_token", "forest", "gap_closed", "head_pages",
    "headline", "leads", "load_curves", "logs", "margins", "mechanism", "mirage", "miss_curves", "miss_map",
    "needle_map", "needle_scores", "one_head", "pool_map", "pool_price", "prefetch_yield", "request_waits",
    "said_and_came", "scale_growth", "sensitivity", "seven", "spells", "stall_price", "step_parts", "sweep",
    "systems", "table_4", "taught_orders", "ten_steps", "tier_answers", "tier_codes", "tier_memory", "tier_sharing",
    "tier_sweep", "token_markers", "variants", "verdict_table", "wakers",
]  # fmt: skip

FIGURES: dict[str, Callable[..., Picture]] = {
    "one_head": one_head,  # what a page is, and a want
    "needle_scores": needle_scores,  # all heads asleep and awake
    "mechanism": mechanism,  # Figure 1b, from a real head
    "miss_curves": miss_curves,  # Figure 2
    "miss_map": miss_map,  # where in the model the misses fall
    "head_pages": head_pages,  # one head leaves the pages it began with
    "wakers": wakers,  # the heads that sleep and wake
    "table_4": table_4,  # Table 4 with intervals
    "drift_settings": drift_settings,  # the drift fraction at other thresholds and windows
    "spells": spells,  # how long heads read, and rest
    "alarms": alarms,  # one head's wake-ups, and the alarms before them
    "leads": leads,  # precision and recall against the lead
    "forest": forest,  # every signal beside chance
    "mirage": mirage,  # what can be deployed, and what the oracle promises
    "token_markers": token_markers,  # tokens that announce wake-ups
    "burst_steps": burst_steps,  # heads that wake together
    "prefetch_yield": prefetch_yield,  # what acting on alarms would save
    "figure_1a": figure_1a,  # Figure 1a, measured
    "margins": margins,  # reactive against each other one, at equal memory
    "ten_steps": ten_steps,  # a real cache: one head's pages and bytes
    "equal_memory": equal_memory,  # reversible against destructive, in answers
    "stall_price": stall_price,  # and what return costs in time
    "step_parts": step_parts,  # where the time of a step goes
    "needle_map": needle_map,  # needles found, with and without return
    "cost_growth": cost_growth,  # time and memory as the context grows
    "gap_closed": gap_closed,  # one budget for all heads, on the way to the optimum
    "pool_map": pool_map,  # where its memory is
    "pool_price": pool_price,  # what it is worth in a real cache
    "load_curves": load_curves,  # who keeps their objectives, load by load
    "request_waits": request_waits,  # to the first token, and between tokens
    "said_and_came": said_and_came,  # is the miss model as right as it says?
    "fairness": fairness,  # several agents on one pool
    "taught_orders": taught_orders,  # learned eviction beside every baseline
    "scale_growth": scale_growth,  # what simulating costs as logs grow
    "tier_memory": tier_memory,  # what stays on the fast tier as the text grows
    "tier_answers": tier_answers,  # what that costs in answers
    "tier_sweep": tier_sweep,  # and in time, by threshold
    "tier_codes": tier_codes,  # pages kept as codes
    "tier_sharing": tier_sharing,  # keys and values that are alike
    "first_token": first_token,  # how long the engine takes to it, with the reservoir and without
    "engine_front": engine_front,  # a serving engine: speed against fidelity
    "engine_parts": engine_parts,  # where the time of its step goes
    "engine_growth": engine_growth,  # how its gain grows with context and requests
    "claims_beside": claims_beside,  # every claim, published and ours
}
TABLES: dict[str, Callable[..., Table]] = {
    "logs": logs,  # what was recorded
    "sweep": sweep,  # Table 3
    "variants": variants,  # how much the open choices matter
    "pooled_logs": measured.logs,  # which logs section 2 stands on
    "churn": measured.churn,  # Table 4
    "wakeups": measured.wakeups,  # section 2.2: signals
    "markers": measured.markers,  # section 2.2: markers
    "tokens": measured.tokens,  # the tokens themselves
    "bursts": measured.bursts,  # section 2.2: bursts
    "prefetching": measured.prefetching,  # what prediction would have to reach
    "headline": headline,  # Table 1
    "seven": seven,  # Table 3, with memory
    "systems": systems,  # the systems of Figure 1a
    "sensitivity": sensitivity,  # how much the open choices move the comparisons
    "cache_steps": twins.steps,  # one head of a real cache, step by step
    "at_equal_memory": twins.at_equal_memory,  # reversible against destructive, in answers
    "needles_found": twins.found,  # with and without return
    "stalls": twins.stalls,  # and what return costs in time
    "cache_costs": twins.costs,  # a step by context and cache
    "beyond": gained.beyond,  # one budget for all heads against a budget each
    "goal": gained.goal,  # how much of the way to the optimum, over every budget
    "tried": gained.tried,  # every order that was tried
    "chance": gained.chance,  # what luck keeps from any order
    "where": gained.where,  # where a pool's memory is
    "pools": gained.in_cache,  # and what it is worth in a real cache
    "pools_timed": gained.in_time,
    "pools_saved": gained.saved,
    "predicted": gained.predicted,  # what a plan foresees, and what a cache then does
    "server_costs": scheduling.server_costs,  # what an iteration of a server costs
    "scheduled": scheduling.scheduled,  # who keeps their objectives
    "foreseen": scheduling.foreseen,  # how well misses are foretold
    "hidden": scheduling.hidden,  # whether hidden states are worth keeping
    "tenants": scheduling.tenants,  # several agents on one pool
    "eviction": taught.eviction,  # learned eviction beside every baseline
    "asked_again": taught.asked_again,  # on questions about what was given up
    "tiers": tiered.tiers,  # other fast tiers: what they hold, move and cost
    "tiers_told": tiered.told,  # what similarity said of what was away
    "tiers_flagged": tiered.flagged,  # what a* would demote, by what it is pooled over
    "first_tokens": tiered.first_token,  # in the engine, with the reservoir and without
    "tiers_verdict": tiered.verdict,  # below 0.05 with at most 60 % held?
    "tiers_timed": tiered.retrieval,  # retrieval and perplexity by threshold
    "verdict_table": verdict_table,  # every claim with its verdict
}
