"""Totals of several steps, their ratios to the reference, and how close the replay is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.live.arms import REFERENCE
from benchmarks.live.figures import Spread, markdown, spread
from rollout_sched.metrics import Step
from rollout_sched.simulators.replay.runs import Run

TOTALS = (
    "arm",
    "all trained s",
    "ratio",
    "replayed s",
    "live by replayed",
    "stale mean",
    "most",
    "thrown away",
    "router CPU s",
    "failures",
)


class LiveRun(msgspec.Struct, frozen=True):
    """One job through one arm; seconds are simulated, except router_cpu_s, which is CPU.

    discarded, idle: shares of the tokens made and of the instances' time; None through a router,
    which has no journal. anomalies: answers that contradict what the scheduler knew. busy, busiest,
    foreign: see `machine.Load`.
    """

    arm: str
    repetition: int
    total_s: float
    steps_s: list[float]
    staleness_mean: float
    staleness_max: int
    samples: int
    discarded: float | None
    idle: float | None
    anomalies: dict[str, int]
    failures: list[str]
    busy: float
    busiest: float
    foreign: float
    router_cpu_s: float


class ReplayedRun(msgspec.Struct, frozen=True):
    """The same job in virtual time."""

    arm: str
    repetition: int
    total_s: float
    steps_s: list[float]
    staleness_mean: float
    staleness_max: int
    discarded: float
    idle: float


def replayed(arm: str, repetition: int, run: Run) -> ReplayedRun:
    summary = run.summary
    return ReplayedRun(
        arm,
        repetition,
        summary.total_s,
        [step.end_s - step.start_s for step in run.steps],
        summary.staleness_mean,
        summary.staleness_max,
        summary.discarded_tokens / max(1.0, summary.tokens_per_s * summary.total_s),
        idle_share(run.steps),
    )


def idle_share(steps: Sequence[Step]) -> float:
    """Share of the instances' time in which they had no work, up to the last batch."""
    capacity_s = sum(step.capacity_s for step in steps)
    return sum(sum(step.idle_s.values()) for step in steps) / max(capacity_s, 1e-9)


def paired(
    above: Sequence[LiveRun], below: Sequence[LiveRun] | Sequence[ReplayedRun]
) -> Spread | None:
    """The ratios of the totals, repetition by repetition; None if no repetition has both."""
    by = {one.repetition: one.total_s for one in below}
    found = [one.total_s / by[one.repetition] for one in above if one.repetition in by]
    return spread(found) if found else None


def totals(live: Sequence[LiveRun], virtual: Sequence[ReplayedRun]) -> list[str]:
    """One row per arm: median (min-max) of the repetitions."""
    reference = [one for one in live if one.arm == REFERENCE]
    rows: list[Sequence[str]] = [TOTALS]
    for arm in dict.fromkeys(one.arm for one in live):
        mine = [one for one in live if one.arm == arm]
        twin = [one for one in virtual if one.arm == arm]
        rows.append(
            [
                arm,
                spread([one.total_s for one in mine]).show(0),
                _ratio(paired(mine, reference)),
                spread([one.total_s for one in twin]).show(0) if twin else "-",
                _ratio(paired(mine, twin)),
                f"{statistics.mean(one.staleness_mean for one in mine):.2f}",
                str(max(one.staleness_max for one in mine)),
                _share([one.discarded for one in mine]),
                f"{statistics.median(one.router_cpu_s for one in mine):.1f}",
                str(sum(len(one.failures) for one in mine)),
            ]
        )
    return markdown(rows)


def steps(live: Sequence[LiveRun], virtual: Sequence[ReplayedRun]) -> list[str]:
    """Seconds from batch to batch: live, and replayed below it; medians of the repetitions."""
    longest = max(len(times) for times in [*_steps_of(live), *_steps_of(virtual)])
    rows: list[Sequence[str]] = [["arm", "", *(f"step {n + 1}" for n in range(longest)), "idle"]]
    for arm in dict.fromkeys(one.arm for one in live):
        live_runs = [one for one in live if one.arm == arm]
        twins = [one for one in virtual if one.arm == arm]
        for name, times, idle in (
            ("live", _steps_of(live_runs), [one.idle for one in live_runs]),
            ("replayed", _steps_of(twins), [one.idle for one in twins]),
        ):
            if times:
                shown = [f"{median:.0f}" for median in _medians(times)]
                blank = [""] * (longest - len(shown))
                rows.append([arm, name, *shown, *blank, _share(idle)])
    return markdown(rows)


def _steps_of(runs: Sequence[LiveRun] | Sequence[ReplayedRun]) -> list[list[float]]:
    return [run.steps_s for run in runs]


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    """Medians by position, over the runs that have that position."""
    return [
        statistics.median(values[place] for values in runs if place < len(values))
        for place in range(max(map(len, runs)))
    ]


def _ratio(found: Spread | None) -> str:
    return found.show(2) if found else "-"


def _share(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0%}" if known else "-"
