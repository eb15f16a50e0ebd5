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
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import stdev
from types import MappingProxyType
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
    """A mean over the seeds; `low` to `high` is the 95 % interval, None if nothing was resampled
    (and, for a ratio that is not to the first policy, if there is but one seed)."""

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
    mean_ratio: Ratio
    steady_mean_ratio: float | None
    longest_tenth_kept: Ratio
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
    mean_ratio = _own(lambda run: run.summary.length_bias.mean_ratio, runs, drawn)
    tenth_kept = _own(lambda run: run.summary.length_bias.longest_tenth_kept, runs, drawn)
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
        bias=_bias(mean_ratio.value, tenth_kept.value, steady_ratio),
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


def _own(figure: Callable[[Run], float], runs: Sequence[Run], drawn: Sequence[Run]) -> Ratio:
    """The mean of a ratio of the policy's own samples, with a t interval: from the spread of the
    resamples, or without them from that of the seeds, which says what other draws of the samples
    that start over might have shown."""
    values = [figure(run) for run in runs]
    again = [figure(run) for run in drawn]
    middle = mean(values)
    if len(again) >= 2:
        half = t95(len(again)) * stdev(again)
    elif len(values) >= 2:
        half = t95(len(values)) * stdev(values) / math.sqrt(len(values))
    else:
        return Ratio(middle)
    return Ratio(middle, middle - half, middle + half)


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
# The Pareto frontier.

Policy = dict[str, Any]

#: The rule of the frontier, as its legend says it.
FRONTIER = "no other row is as good in speed, staleness, bias and GPUs, and better in one of them"


def frontier(policies: Sequence[Policy]) -> list[int]:
    """The indexes of the policies that no other beats, fastest first; `gpus` counts if given."""
    scores = [_scores(policy) for policy in policies]
    best = [
        place
        for place, mine in enumerate(scores)
        if not any(
            other != mine and all(o >= m for o, m in zip(other, mine, strict=True))
            for other in scores
        )
    ]
    return sorted(best, key=lambda place: scores[place], reverse=True)


def _scores(policy: Policy) -> tuple[int, ...]:
    """Integers of which more is better, rounded to the differences that matter."""
    speed = policy["equal_length_tokens_per_s"]["mean"]
    less = (
        (policy["staleness"]["mean"]["mean"], 0.1),
        (policy["comparison"]["step_ks_excess"], 0.02),
        (policy.get("gpus", 0), 1.0),
    )
    return (
        round(100 * math.log(speed)) if speed else -(10**9),
        round(100 * policy["length_bias"]["longest_tenth_kept"]["mean"]),
        *(-round(figure / fine) for figure, fine in less),
    )


# ------------------------------------------------------------------------------------------
# What limits a policy.

#: The smallest share of the instances' or the trainer's time for which a cause is named.
WORTH_NAMING = 0.05

#: A run at most this far above the bound counts as being at the bound.
NEAR_BOUND = 0.05

#: By what limits a policy: a word for the table, a sentence of the verdict, and what always helps.
LIMITS = {
    "bound": ("bound", "It is at the bound: no policy can be much faster", ""),
    "trainer": ("trainer", "It is limited by the trainer, which hardly waits", "more GPUs for it"),
    "barrier": ("tail", "It is limited by the tail of each batch", "rollout-sched tune"),
    "queue_empty": ("no work", "It is limited by too few requests to start", "fewer instances"),
    "weight_update": ("updates", "It is limited by weight updates", "a faster transfer"),
    "tool_wait": ("tools", "It is limited by waiting for tools", "more trajectories at once"),
    "kv_stall": ("KV memory", "It is limited by KV memory", "more KV memory"),
    "generation": ("generation", "It is limited by generation", "more instances"),
}


def limit(policy: Policy) -> tuple[str, float]:
    """Which of LIMITS it is, and the share of instance time that is idle because of it."""
    gap = policy["gap_to_offered_bound"]
    if gap is not None and gap["mean"] <= NEAR_BOUND:
        return "bound", 0.0
    if policy["trainer_wait_s"]["mean"] < WORTH_NAMING * policy["total_s"]["mean"]:
        return "trainer", 0.0
    idle = policy["idle_bubble_by_cause"]
    cause = max(idle.keys() & LIMITS.keys(), key=lambda name: (idle[name]["mean"], name))
    if idle[cause]["mean"] >= WORTH_NAMING:
        return cause, idle[cause]["mean"]
    return ("kv_stall" if policy["preemptions"]["mean"] else "generation"), 0.0


def limited_by(policy: Policy) -> str:
    """The limit in a word, and its share."""
    name, share = limit(policy)
    return f"{LIMITS[name][0]} {100 * share:.0f} %" if share else LIMITS[name][0]


# ------------------------------------------------------------------------------------------
# The verdict of a replay in words: the fastest allowed policy at each staleness; the costs of the
# fastest of all, what limits it, and what to try next. Each sentence follows from figures of the
# report by a rule below.

#: Without an interval, ratios that differ by less than this count as equal.
LEVEL = 0.02

#: Beyond chance; see `length_bias.step_ks`.
CURRICULUM = 0.1

#: Tokens thrown away for each one trained.
WASTE = 0.05


def fastest(report: Policy, max_staleness: int | None = None) -> Policy | None:
    """The fastest policy that trains all the requested lengths. `max_staleness`: how many versions
    old a sample may be; None: no limit."""
    allowed = _allowed(report, max_staleness)
    return max(allowed, key=_speed_up) if allowed else None


def verdict(
    report: Policy,
    max_staleness: int | None = None,
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[str]:
    """Sentences, the answer first. `max_staleness`: as in `fastest`; `settings`: the tables of each
    policy, by name."""
    best = fastest(report, max_staleness)
    if best is None:
        within = "" if max_staleness is None else f" at staleness {max_staleness} or less"
        none = f"No policy here trains all the requested lengths{within}."
        return [none] if report["prompts"] else []
    allowed = _allowed(report, max_staleness)
    others = [policy for policy in report["policies"] if policy not in allowed]
    tables = settings.get(best["name"], {})
    return [
        *_at_each_staleness(allowed, report["policies"][0]),
        *_faster_but(best, others),
        *_unequal(best, allowed),
        *_costs(best),
        *_limits(best, report, tables, fresh=max_staleness == 0),
    ]


def _allowed(report: Policy, max_staleness: int | None) -> list[Policy]:
    return [
        policy
        for policy in report["policies"]
        if report["prompts"]
        and policy["comparison"]["bias"] != "shorter"
        and (max_staleness is None or _stale(policy) <= max_staleness)
    ]


def _stale(policy: Policy) -> int:
    return int(policy["staleness"]["max"]["max"])


def staleness_allowed(policy: Policy) -> int:
    """By its bound, or what it reached if it has none."""
    bound: int | None = policy["max_staleness"]
    return _stale(policy) if bound is None else bound


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


def _at_each_staleness(allowed: Sequence[Policy], first: Policy) -> Iterator[str]:
    """The fastest at each staleness that brings speed, and who comes next at the same."""
    before = 0.0
    for stale in sorted({staleness_allowed(policy) for policy in allowed}):
        equal = [policy for policy in allowed if staleness_allowed(policy) == stale]
        ranked = sorted(equal, key=_speed_up, reverse=True)
        best, *rest = ranked
        if _speed_up(best) <= before:
            continue
        before = _speed_up(best)
        at = f"Fastest at staleness {stale}: {best['name']}, "
        level = [one for one in rest if _speed_up(one) >= _low(best)]
        said = ", ".join(f"{one['name']} {_shown(one)}" for one in level or rest[:1])
        after = f"; {'level with it' if level else 'next'}: {said}" if said else ""
        if best is first:
            yield f"{at}the policy that the others are compared with{after}."
        else:
            doubt = "" if _low(best) > 1 else ", which may be chance"
            yield f"{at}{_shown(best)} of {first['name']}{doubt}{after}."


def _faster_but(best: Policy, others: Sequence[Policy]) -> Iterator[str]:
    for policy in others:
        if _speed_up(policy) > _speed_up(best):
            why = (
                "trains shorter samples than requested"
                if policy["comparison"]["bias"] == "shorter"
                else f"trains samples up to {_stale(policy)} versions old"
            )
            yield f"{policy['name']} is faster ({_shown(policy)}) but {why}."


def _unequal(best: Policy, allowed: Sequence[Policy]) -> Iterator[str]:
    """A policy that was allowed less staleness than the fastest and may be faster with as much."""
    stale = staleness_allowed(best)
    as_old = {_system(one) for one in allowed if staleness_allowed(one) >= stale}
    less = [one for one in allowed if one["max_staleness"] and _system(one) not in as_old]
    if less:
        other = max(less, key=_speed_up)
        yield (
            f"{other['name']} was allowed a staleness of {other['max_staleness']} only: add "
            f"--policy '{_system(other)} freshness.max_staleness={stale}' to compare at {stale}."
        )


def _system(policy: Policy) -> str:
    """Its name without the changed parameters."""
    name: str = policy["name"].partition(" ")[0]
    return name


def _costs(best: Policy) -> Iterator[str]:
    costs = []
    stale, bias = best["staleness"], best["comparison"]["bias"]
    if stale["max"]["max"]:
        costs.append(
            f"samples {stale['mean']['mean']:.2f} versions old on average, {_stale(best)} at most"
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
    yield (
        f"The costs of {best['name']}: {'; '.join(costs)}."
        if costs
        else f"{best['name']} has no cost that is measured here."
    )


def _limits(
    best: Policy, report: Policy, tables: Mapping[str, Any], *, fresh: bool
) -> Iterator[str]:
    name, share = limit(best)
    _, what, helps = LIMITS[name]
    if share:
        what += f" ({100 * share:.0f} % of instance time is idle because of it)"
    sent = best.get("weights", {}).get("sent_bytes")
    if name == "weight_update" and sent:
        link = max(sent, key=lambda one: sent[one]["mean"])
        what += f"; they come by {link}"
        helps = "another weights.plan in the scenario"
    replayed = {_system(policy) for policy in report["policies"]}
    ours = ["best_on_policy"] * (not _stale(best)) + ["best_async"] * (not fresh)
    new = [one for one in ours if one not in replayed and name in ("barrier", "queue_empty")]
    remedies = [*new, *_settings(name, tables), helps]
    yield f"{what}. Try {' or '.join(remedies)}." if helps else f"{what}."


def _settings(limit: str, tables: Mapping[str, Any]) -> Iterator[str]:
    """What may help, but not what the policy has."""
    batching, interruption = tables.get("batching", {}), tables.get("interruption", {})
    if limit == "queue_empty":
        bounds = (key for key in ("max_groups", "max_ahead", "over_prompts") if batching.get(key))
        yield from (f"a larger batching.{key}" for key in bounds)
    elif limit == "weight_update":
        how = interruption.get("use"), interruption.get("at_update", "in_place")
        if how != ("partial", "in_place"):
            yield 'interruption.at_update = "in_place"'
        if tables.get("weights", {}).get("use") != "rolling":
            yield 'weights.use = "rolling"'
    elif limit == "kv_stall" and tables.get("admission", {}).get("use", "slots") == "slots":
        yield 'admission.use = "session_cap" or "kv_growth"'
