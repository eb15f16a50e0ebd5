"""The verdict of a replay in words: the fastest allowed policy, its costs, its bottleneck, and what
to try next. Each sentence follows from figures of the report by a rule below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Policy = dict[str, Any]

#: Without an interval, ratios that differ by less than this count as equal.
LEVEL = 0.02

#: The smallest share of the instances' or the trainer's time for which a cause is named.
WORTH_NAMING = 0.05

#: A run at most this far above the bound counts as being at the bound.
NEAR_BOUND = 0.05

#: Beyond chance; see `length_bias.step_ks`.
CURRICULUM = 0.1

#: Tokens thrown away for each one trained.
WASTE = 0.05

#: By the cause of an idle bubble: the bottleneck, and what may help.
CAUSES = {
    "barrier": (
        "the tail: instances wait for the last answers of a batch",
        "best_on_policy at staleness 0, best_async if samples may be older, or tune",
    ),
    "queue_empty": (
        "too little work: nothing is left to start",
        "more prompts ahead (max_ahead, over_prompts), or fewer instances",
    ),
    "weight_update": (
        "weight updates: instances stop for them",
        "in-place or rolling updates (weights.when, interruption.at_update), a faster transfer",
    ),
    "tool_wait": (
        "tools: instances wait while tools run",
        "more trajectories at once, or faster tools",
    ),
    "kv_stall": (
        "KV memory: waiting requests do not fit",
        "more KV memory, session_cap, or kv-aware admission",
    ),
}


def verdict(report: Policy, max_staleness: int | None = None) -> list[str]:
    """Sentences, the answer first. `max_staleness`: how many versions old a sample may be; None: no
    limit."""
    policies = report["policies"]
    if not report["prompts"]:
        return []
    allowed = [policy for policy in policies if _allowed(policy, max_staleness)]
    within = "" if max_staleness is None else f" at staleness {max_staleness} or less"
    if not allowed:
        return [f"No policy here trains all the requested lengths{within}."]
    best = max(allowed, key=_speed_up)
    return [
        _fastest(best, policies[0], within),
        *_as_fast(best, allowed),
        *_faster_but(best, [policy for policy in policies if policy not in allowed], max_staleness),
        *_costs(best),
        *_bounds(best),
    ]


def _allowed(policy: Policy, max_staleness: int | None) -> bool:
    stale = policy["staleness"]["max"]["max"]
    return policy["comparison"]["bias"] != "shorter" and (
        max_staleness is None or stale <= max_staleness
    )


def _speed_up(policy: Policy) -> float:
    found: float = policy["comparison"]["speed_up"]["value"]
    return found


def _shown(policy: Policy) -> str:
    ratio = policy["comparison"]["speed_up"]
    sure = "" if ratio["low"] is None else f" ({ratio['low']:.2f}-{ratio['high']:.2f})"
    return f"{ratio['value']:.2f}x{sure}"


def _low(policy: Policy) -> float:
    ratio = policy["comparison"]["speed_up"]
    low: float = ratio["value"] * (1 - LEVEL) if ratio["low"] is None else ratio["low"]
    return low


def _fastest(best: Policy, first: Policy, within: str) -> str:
    if best is first:
        return f"Fastest{within}: {best['name']}, the policy that the others are compared with."
    doubt = "" if _low(best) > 1 else ", which may be chance"
    return f"Fastest{within}: {best['name']}, {_shown(best)} of {first['name']}{doubt}."


def _as_fast(best: Policy, allowed: Sequence[Policy]) -> Iterator[str]:
    level = [
        f"{policy['name']} ({_shown(policy)})"
        for policy in allowed
        if policy is not best and _speed_up(policy) > 1 and _speed_up(policy) >= _low(best)
    ]
    if level:
        yield f"This replay cannot tell these from the fastest: {', '.join(level)}."


def _faster_but(best: Policy, others: Sequence[Policy], max_staleness: int | None) -> Iterator[str]:
    for policy in others:
        if _speed_up(policy) <= _speed_up(best):
            continue
        stale = policy["staleness"]["max"]["max"]
        why = (
            "trains shorter samples than requested"
            if policy["comparison"]["bias"] == "shorter"
            else f"trains samples up to {stale:.0f} versions old"
        )
        yield f"{policy['name']} is faster ({_shown(policy)}) but {why}."


def _costs(best: Policy) -> Iterator[str]:
    costs = []
    stale, bias = best["staleness"], best["comparison"]["bias"]
    if stale["max"]["max"]:
        costs.append(
            f"samples {stale['mean']['mean']:.2f} versions old on average, "
            f"{stale['max']['max']:.0f} at most"
        )
    discarded = best["comparison"]["discarded_share"]
    if discarded >= WASTE:
        costs.append(f"{100 * discarded:.0f} tokens discarded per 100 trained")
    if best["comparison"]["step_ks_excess"] >= CURRICULUM:
        costs.append(
            f"steps of similar lengths (KS {best['comparison']['step_ks_excess']:.2f} beyond "
            f"chance), which is a curriculum by length"
        )
    if bias == "long last":
        costs.append("long samples trained only at the end of the run")
    yield f"Its costs: {'; '.join(costs)}." if costs else "It has no cost that is measured here."


def _bounds(best: Policy) -> Iterator[str]:
    gap = best["gap_to_offered_bound"]
    if gap is not None and gap["mean"] <= NEAR_BOUND:
        yield "It is at the bound: no policy here can be faster by more than a few percent."
        return
    total_s, waits_s = best["total_s"]["mean"], best["trainer_wait_s"]["mean"]
    if waits_s < WORTH_NAMING * total_s:
        yield "Bounded by the trainer, which almost never waits: give it more GPUs."
        return
    causes = {
        cause: share["mean"]
        for cause, share in best["idle_bubble_by_cause"].items()
        if cause in CAUSES
    }
    cause = max(causes, key=lambda name: causes[name])
    if causes[cause] >= WORTH_NAMING:
        what, remedy = CAUSES[cause]
        yield f"Bounded by {what} ({100 * causes[cause]:.0f} % of instance time). Try {remedy}."
    elif best["preemptions"]["mean"]:
        what, remedy = CAUSES["kv_stall"]
        yield f"Bounded by {what}: {best['preemptions']['mean']:.0f} preemptions. Try {remedy}."
    else:
        yield "Bounded by generation: the instances are busy. Try more instances."
