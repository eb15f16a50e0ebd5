"""Judge whether the observations of a soak are as required."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MIB = 2**20

#: Bytes by which the gateway may grow over the last two thirds of a soak, by a least-squares line
#: through its memory: 200,000 calls that leave 100 bytes each are 20 MB.
MAX_GROWTH = 16 * MIB

#: How many times longer the slowest hundredth of innocent calls may wait beside hostile clients,
#: and milliseconds of noise in addition.
MAX_TIMES = 2.0
NOISE_MS = 5.0

#: The same beside a client that floods the gateway, and the trainer's share of its batches.
MAX_TIMES_FLOODED = 3.0
MIN_BATCHES = 0.9


@dataclass
class Arm:
    """What innocent clients observed, without or with hostile clients beside them."""

    latencies_s: list[float] = field(default_factory=list)
    calls: int = 0
    hung: int = 0
    server_errors: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    def percentile_ms(self, share: float) -> float:
        """Infinite without calls."""
        if not self.latencies_s:
            return float("inf")
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Seen:
    """All observations. `memory`: (seconds, bytes) of the gateway; `left`: what its state still
    held at the end, in words; `hostile`: outcomes of each kind of attack; `unexpected`: forbidden
    ones; `skipped`: calls that were not started. `quiet` and `flooded`: beside a trainer only, and
    beside a flood too; `batches`: the trainer's per second in slices of each; `flood`: the flood's
    answers by status."""

    without: Arm = field(default_factory=Arm)
    beside: Arm = field(default_factory=Arm)
    quiet: Arm = field(default_factory=Arm)
    flooded: Arm = field(default_factory=Arm)
    batches: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    flood: Counter[int] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)
    hostile: dict[str, Counter[str]] = field(default_factory=dict)
    unexpected: Counter[str] = field(default_factory=Counter)
    left: str = ""
    skipped: int = 0


@dataclass(frozen=True)
class Finding:
    name: str
    holds: bool
    told: str

    def __str__(self) -> str:
        return f"{'ok    ' if self.holds else 'BROKEN'} {self.name:9} {self.told}"


def findings(seen: Seen) -> list[Finding]:
    return [
        _memory(seen),
        _latency(seen),
        _flood(seen),
        _batches(seen),
        _answers(seen),
        _hostile(seen),
        _state(seen),
    ]


def growth(memory: Sequence[tuple[float, float]]) -> float:
    """Growth in bytes over the last two thirds, by a least-squares line."""
    late = memory[len(memory) // 3 :]
    if len(late) < 2:
        return 0.0
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope
    return slope * (late[-1][0] - late[0][0])


def _memory(seen: Seen) -> Finding:
    grown = growth(seen.memory)
    levels = [level for _, level in seen.memory] or [0.0]
    told = (
        f"{grown / MIB:+.1f} MiB over the last two thirds (at most {MAX_GROWTH / MIB:.0f}); "
        f"{levels[0] / MIB:.0f} MiB at first, {levels[-1] / MIB:.0f} at the end, "
        f"at most {max(levels) / MIB:.0f}"
    )
    return Finding("memory", grown <= MAX_GROWTH, told)


def _latency(seen: Seen) -> Finding:
    without, beside = seen.without.percentile_ms(0.99), seen.beside.percentile_ms(0.99)
    told = (
        f"innocents' p50 / p99: {seen.without.percentile_ms(0.5):.1f} / {without:.1f} ms without, "
        f"{seen.beside.percentile_ms(0.5):.1f} / {beside:.1f} ms with hostile clients "
        f"(at most {MAX_TIMES:g} x)"
    )
    holds = math.isfinite(beside) and beside <= MAX_TIMES * without + NOISE_MS
    return Finding("latency", holds, told)


def _flood(seen: Seen) -> Finding:
    quiet, flooded = seen.quiet.percentile_ms(0.99), seen.flooded.percentile_ms(0.99)
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(seen.flood.items()))
    told = (
        f"innocents' p99 beside a trainer: {quiet:.1f} ms, beside a flood too: {flooded:.1f} ms "
        f"(at most {MAX_TIMES_FLOODED:g} x); the flood's answers: {answers or 'none'}"
    )
    holds = math.isfinite(flooded) and flooded <= MAX_TIMES_FLOODED * quiet + NOISE_MS
    return Finding("flood", holds, told)


def _batches(seen: Seen) -> Finding:
    alone, beside = (statistics.median(seen.batches[flooded] or [0.0]) for flooded in (False, True))
    told = (
        f"the trainer's batches per second: {alone:.2f}, beside a flood {beside:.2f} "
        f"(at least {MIN_BATCHES:g} x)"
    )
    return Finding("trainer", beside > 0 and beside >= MIN_BATCHES * alone, told)


def _answers(seen: Seen) -> Finding:
    arms = (seen.without, seen.beside, seen.quiet, seen.flooded)
    calls, hung = sum(arm.calls for arm in arms), sum(arm.hung for arm in arms)
    errors = sum(arm.server_errors for arm in arms)
    wrong: Counter[str] = sum([arm.wrong for arm in arms], Counter())
    told = (
        f"{calls} innocent calls, {seen.skipped} not started, {hung} without an answer, "
        f"{errors} with a 5xx, {wrong.total()} with a wrong or incomplete answer"
    )
    told += "".join(f"\n    {count} x {why}" for why, count in wrong.most_common(5))
    holds = bool(calls) and not (hung or errors or wrong or seen.skipped)
    return Finding("answers", holds, told)


def _hostile(seen: Seen) -> Finding:
    total = sum(outcomes.total() for outcomes in seen.hostile.values())
    told = f"{total} hostile calls, {seen.unexpected.total()} with a forbidden outcome"
    for kind, outcomes in sorted(seen.hostile.items()):
        told += f"\n    {kind}: " + ", ".join(f"{n} x {how}" for how, n in outcomes.most_common(5))
    return Finding("hostile", bool(total) and not seen.unexpected, told)


def _state(seen: Seen) -> Finding:
    return Finding("state", not seen.left, seen.left or "nothing is left in the gateway")
