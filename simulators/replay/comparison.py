"""Compare policies: how much faster than the first each one is, and how certain that is. Training
shorter samples brings no advantage in these figures.

    runs = replay(trace, policies, scenario, seeds=3)
    resamples = replay_resampled(trace, policies, scenario, resamples=12)
    for policy in compared(runs, resamples):
        print(policy.name, policy.speed_up.value, policy.speed_up.interval, policy.bias)

Ratios are paired: the policy and the first one run on the same prompts in the same order, and the
ratio is averaged over the seeds. Its interval says what another draw of as many similar prompts
might have shown. For it, prompts are resampled (Efron's bootstrap) and both policies run again on
each resample, because the time of a run is not a sum over its prompts that could be resampled
without running again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import stdev
from typing import Any, Literal

import msgspec

from rollout_sched.metrics.fold import mean, t95
from rollout_sched.simulators.replay.runs import Run

#: A policy's samples count as having the requested lengths from these ratios on: over the whole
#: run, of the longest tenth, and in the steps between the first and the drain. The last is looser,
#: because in a finite run the longest requests always finish late.
LEAST_MEAN_RATIO = 0.99
LEAST_TENTH_KEPT = 0.98
LEAST_STEADY_RATIO = 0.95

Bias = Literal["", "shorter", "long last"]


class Ratio(msgspec.Struct, frozen=True):
    """How many times as fast as the first policy; `low` to `high` is the 95 % interval, None if
    nothing was resampled."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


class Compared(msgspec.Struct, frozen=True):
    """One policy compared with the first one; figures are means over the seeds.

    speed_up            trained tokens per second, counted up to the number requested
    time                seconds of the whole run; favors policies that train shorter samples
    steady              trained tokens per second between the first step and the drain; None if
                        either policy has no such steps
    bias                "shorter": it trained less than requested, in the whole run or in its
                        longest tenth. "long last": it trained everything, but the long samples only
                        at the end. "": neither
    staleness_max       of any sample in any run
    discarded_share     tokens discarded per token trained

    The other fields are those of `Summary` and `LengthBias`.
    """

    name: str
    speed_up: Ratio
    time: Ratio
    steady: Ratio | None
    total_s: float
    first_step_s: float
    drain_s: float
    equal_length_tokens_per_s: float
    steady_tokens_per_s: float | None
    bias: Bias
    mean_ratio: float
    steady_mean_ratio: float | None
    longest_tenth_kept: float
    step_ks_excess: float
    staleness_mean: float
    staleness_max: int
    discarded_share: float


def compared(
    runs: Sequence[Sequence[Run]], resamples: Sequence[Sequence[Run]] = ()
) -> list[Compared]:
    """Each policy compared with the first. `runs`: by policy, then by seed, the same seeds for all;
    `resamples`: by policy, then by resample (see `runs.replay_resampled`)."""
    drawn = resamples or [[] for _ in runs]
    return [
        _compared(of_policy, runs[0], of_drawn, drawn[0])
        for of_policy, of_drawn in zip(runs, drawn, strict=True)
    ]


def _compared(
    runs: Sequence[Run], first: Sequence[Run], drawn: Sequence[Run], drawn_first: Sequence[Run]
) -> Compared:
    def ratio(figure: Callable[[Run], float]) -> Ratio:
        return ratio_of(figure, runs, first, drawn, drawn_first)

    summaries = [run.summary for run in runs]
    biases = [summary.length_bias for summary in summaries]
    mean_ratio = mean([bias.mean_ratio for bias in biases])
    tenth_kept = mean([bias.longest_tenth_kept for bias in biases])
    steady_ratio = _mean_or_none([bias.steady_mean_ratio for bias in biases])
    everybody = [*runs, *first, *drawn, *drawn_first]
    discarded = sum(summary.discarded_tokens for summary in summaries)
    trained = sum(step.tokens for run in runs for step in run.steps)
    return Compared(
        name=runs[0].policy,
        speed_up=ratio(lambda run: run.summary.equal_length_tokens_per_s),
        time=ratio(lambda run: 1 / run.summary.total_s if run.summary.total_s else 0.0),
        steady=ratio(_steady) if all(_steady(run) for run in everybody) else None,
        total_s=mean([summary.total_s for summary in summaries]),
        first_step_s=mean([summary.first_step_s for summary in summaries]),
        drain_s=mean([summary.drain_s for summary in summaries]),
        equal_length_tokens_per_s=mean([s.equal_length_tokens_per_s for s in summaries]),
        steady_tokens_per_s=_mean_or_none([s.steady_accepted_tokens_per_s for s in summaries]),
        bias=_bias(mean_ratio, tenth_kept, steady_ratio),
        mean_ratio=mean_ratio,
        steady_mean_ratio=steady_ratio,
        longest_tenth_kept=tenth_kept,
        step_ks_excess=mean([bias.step_ks_excess for bias in biases]),
        staleness_mean=mean([summary.staleness_mean for summary in summaries]),
        staleness_max=max(summary.staleness_max for summary in summaries),
        discarded_share=discarded / trained if trained else 0.0,
    )


def ratio_of(
    figure: Callable[[Run], float],
    runs: Sequence[Run],
    first: Sequence[Run],
    drawn: Sequence[Run] = (),
    drawn_first: Sequence[Run] = (),
) -> Ratio:
    """The ratio of the figure of `runs` to that of `first`, pair by pair."""
    return _ratio(_logs(runs, first, figure), _logs(drawn, drawn_first, figure))


def _steady(run: Run) -> float:
    return run.summary.steady_accepted_tokens_per_s or 0.0


def _logs(runs: Sequence[Run], first: Sequence[Run], figure: Callable[[Run], float]) -> list[float]:
    """Logarithms of the ratios, pair by pair; 0 if a run of the pair trained nothing."""
    pairs = [(figure(run), figure(base)) for run, base in zip(runs, first, strict=True)]
    return [math.log(ours / theirs) if ours and theirs else 0.0 for ours, theirs in pairs]


def _ratio(logs: Sequence[float], resampled: Sequence[float]) -> Ratio:
    """The geometric mean, with a t interval on the logarithms from the spread of the resamples, for
    which few resamples are enough."""
    middle = mean(logs)
    if len(resampled) < 2:
        return Ratio(math.exp(middle))
    half = t95(len(resampled)) * stdev(resampled)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def _bias(mean_ratio: float, tenth_kept: float, steady_ratio: float | None) -> Bias:
    if mean_ratio < LEAST_MEAN_RATIO or tenth_kept < LEAST_TENTH_KEPT:
        return "shorter"
    if steady_ratio is not None and steady_ratio < LEAST_STEADY_RATIO:
        return "long last"
    return ""


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


# ------------------------------------------------------------------------------------------
# The verdict of a replay in words: the fastest allowed policy, its costs, its bottleneck, and what
# to try next. Each sentence follows from figures of the report by a rule below.

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
        sent = best.get("weights", {}).get("sent_bytes")
        if cause == "weight_update" and sent:
            link = max(sent, key=lambda name: sent[name]["mean"])
            what += f", which come by {link}"
            remedy += " (weights.plan of the scenario)"
        yield f"Bounded by {what} ({100 * causes[cause]:.0f} % of instance time). Try {remedy}."
    elif best["preemptions"]["mean"]:
        what, remedy = CAUSES["kv_stall"]
        yield f"Bounded by {what}: {best['preemptions']['mean']:.0f} preemptions. Try {remedy}."
    else:
        yield "Bounded by generation: the instances are busy. Try more instances."
