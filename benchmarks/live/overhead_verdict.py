"""Evaluate measurements: medians with their ranges, ratios, and the targets.

A repetition measures all arms one after the other. So ratios are taken within a repetition, where
both arms saw the same machine, and the median of these ratios is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from benchmarks.live.arms import OURS, REFERENCE


class Measurement(msgspec.Struct, frozen=True):
    """One arm, one shape, one repetition.

    answered: requests that got a 200; if none did, the arm does not support this shape. cpu_us is
    per request, or per event if answers are streams; latencies are in microseconds, `added` is the
    part beyond the instance's hold time. `foreign` is the share of the machine that others used.
    Core shares are CPU seconds per wall second. `balance`: requests of the instance that got the
    most, divided by the mean (1: evenly).
    """

    shape: str
    arm: str
    repetition: int
    answered: int
    per_s: float
    cpu_us: float
    added_p50: float
    added_p99: float
    transit_p50: float
    transit_p99: float
    rss_mb: float
    core: float
    others_core: float
    balance: float
    errors: int
    foreign: float


Field = Callable[[Measurement], float]


@dataclass(frozen=True)
class Target:
    """Our figure must be at most `limit` times the reference's."""

    shape: str
    what: str
    field: Field
    limit: float


#: The targets of the gateway with its scheduler, relative to the fastest router that balances.
TARGETS = (
    Target("short64", "CPU per request", lambda m: m.cpu_us, 1.5),
    Target("rltok16", "CPU per request", lambda m: m.cpu_us, 1.0),
    Target("held1024", "added latency p50", lambda m: m.added_p50, 1.0),
    Target("held1024", "added latency p99", lambda m: m.added_p99, 1.0),
    Target("stream256", "transit p50", lambda m: m.transit_p50, 1.0),
    Target("stream256", "transit p99", lambda m: m.transit_p99, 1.0),
)


class Verdict(msgspec.Struct, frozen=True):
    """A target and its measurement. `ratio` None: one of the two arms did not run.

    `low` and `high` contain the true median 19 times out of 20; None with too few repetitions.
    """

    shape: str
    what: str
    limit: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    repetitions: int = 0

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio <= self.limit

    @property
    def level(self) -> bool:
        """Above its limit, but within what chance may explain."""
        return not self.met and self.low is not None and self.low <= self.limit

    def show(self) -> str:
        claim = f"{self.shape}: {self.what} at most {self.limit:g}x {REFERENCE}'s"
        if self.ratio is None:
            return f"NOT JUDGED  {claim}: {OURS} or {REFERENCE} was not measured"
        word = "met        " if self.met else "level      " if self.level else "MISSED     "
        sure = "" if self.low is None else f", 95% sure of {self.low:.2f}-{self.high:.2f}"
        return f"{word} {claim}: {self.ratio:.2f}x ({self.repetitions} repetitions{sure})"


def verdicts(measurements: Sequence[Measurement], shapes: Sequence[str]) -> list[Verdict]:
    """The verdict on every target whose shape was requested."""
    return [judge(target, measurements) for target in TARGETS if target.shape in shapes]


def judge(target: Target, measurements: Sequence[Measurement]) -> Verdict:
    """Compare ours with the reference, repetition by repetition."""
    found = ratios(measurements, target.shape, OURS, target.field)
    if not found:
        return Verdict(target.shape, target.what, target.limit)
    low, high = interval(found) or (None, None)
    return Verdict(target.shape, target.what, target.limit, median(found), low, high, len(found))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval that contains the true median 19 times out of 20; None with too few values.

    It is that of the sign test, which assumes nothing about the distribution: at either end, as
    many values are left out as would rarely (1 in 40) be all those beyond the median.
    """
    left_out, chance = 0, 0.5 ** len(values)
    while chance <= 0.025:
        left_out += 1
        chance += math.comb(len(values), left_out) * 0.5 ** len(values)
    if not left_out:
        return None
    return sorted(values)[left_out - 1], sorted(values, reverse=True)[left_out - 1]


def ratios(measurements: Sequence[Measurement], shape: str, arm: str, field: Field) -> list[float]:
    """The arm's figure divided by the reference's, of each repetition that has both."""
    by_arm = {
        name: {m.repetition: field(m) for m in measurements if (m.shape, m.arm) == (shape, name)}
        for name in (arm, REFERENCE)
    }
    return [
        value / by_arm[REFERENCE][repetition]
        for repetition, value in by_arm[arm].items()
        if by_arm[REFERENCE].get(repetition, 0) > 0
    ]


def errors(measurements: Sequence[Measurement], arm: str) -> int:
    """Answers of an arm that were not 200 or not complete."""
    return sum(m.errors for m in measurements if m.arm == arm)


@dataclass(frozen=True)
class Column:
    title: str
    field: Field
    decimals: int
    relative: bool = False  # also show the ratio to the reference


def columns(streams: bool, held: bool) -> list[Column]:
    """The columns to show for a shape."""
    unit = "event" if streams else "request"
    shown = [
        Column(f"CPU us/{unit}", lambda m: m.cpu_us, 1, relative=True),
        Column("events/s" if streams else "requests/s", lambda m: m.per_s, 0),
    ]
    if streams:
        shown.append(Column("transit p50 us", lambda m: m.transit_p50, 0, relative=True))
        shown.append(Column("transit p99 us", lambda m: m.transit_p99, 0, relative=True))
    else:
        latency = "added" if held else "latency"
        shown.append(Column(f"{latency} p50 us", lambda m: m.added_p50, 0, relative=held))
        shown.append(Column(f"{latency} p99 us", lambda m: m.added_p99, 0, relative=held))
    return [
        *shown,
        Column("RSS MB", lambda m: m.rss_mb, 0),
        Column("core", lambda m: m.core, 2),
        Column("other core", lambda m: m.others_core, 2),
        Column("balance", lambda m: m.balance, 2),
        Column("errors", lambda m: m.errors, 0),
    ]


def table(measurements: Sequence[Measurement], shape: str, shown: Sequence[Column]) -> list[str]:
    """A Markdown table of one shape: one row per arm, median (min-max), then the ratio."""
    rows = [["arm", *(column.title for column in shown)]]
    for arm in dict.fromkeys(m.arm for m in measurements if m.shape == shape):
        rows.append([arm, *(_cell(measurements, shape, arm, column) for column in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in ruled
    ]


def _cell(measurements: Sequence[Measurement], shape: str, arm: str, column: Column) -> str:
    rows = [m for m in measurements if (m.shape, m.arm) == (shape, arm)]
    if not any(m.answered for m in rows):
        return "refuses these" if column.title == "errors" else "-"
    values = [column.field(m) for m in rows]
    middle, least, most = (
        f"{value:,.{column.decimals}f}" for value in (median(values), min(values), max(values))
    )
    text = middle if least == most else f"{middle} ({least}-{most})"
    found = ratios(measurements, shape, arm, column.field) if column.relative else []
    return f"{text} {median(found):.2f}x" if any(found) else text
