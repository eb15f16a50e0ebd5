"""The user's limits, and the measured figures of a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_sched.metrics.averages import mean


class CaseFigures(msgspec.Struct, frozen=True):
    """One candidate in one case.

    tokens_per_s   accepted tokens per second, of the whole run, at equal trained length
    total_s        seconds of the run
    staleness_max, staleness_mean  of the samples, versions
    length_ratio   mean length trained over offered
    longest_kept   share of the longest tenth of the offered samples that was trained
    step_bias      mean over the steps of the distance between a step's lengths and all offered,
                   beyond that of randomly drawn steps (Kolmogorov-Smirnov)
    discarded      tokens thrown away over tokens trained
    failed         why there are no figures, else empty
    """

    tokens_per_s: float = 0.0
    total_s: float = 0.0
    staleness_max: int = 0
    staleness_mean: float = 0.0
    length_ratio: float = 1.0
    longest_kept: float = 1.0
    step_bias: float = 0.0
    discarded: float = 0.0
    failed: str = ""

    @property
    def length_bias(self) -> float:
        """The larger of two: the mean's distance from 1, and half of the missing share of the
        longest tenth. Half, because a cut of the tail is a larger share of the tail than of the
        mean."""
        return max(abs(1 - self.length_ratio), (1 - self.longest_kept) / 2)


class HardLimits(msgspec.Struct, frozen=True):
    """Hard limits: a candidate that exceeds one never wins.

    max_staleness    of any sample, versions
    max_length_bias  B: over the run the mean length trained is within 1 - B and 1 + B of that
                     offered, and of the longest tenth of the samples at least 1 - 2 B are trained
    max_step_bias    C: how far, on average, a step's lengths may differ from those of all prompts,
                     beyond chance
    """

    max_staleness: int
    max_length_bias: float
    max_step_bias: float

    def tightened(self, share: float) -> HardLimits:
        """The same with bias reduced by `share`; staleness does not depend on chance."""
        return HardLimits(
            self.max_staleness,
            (1 - share) * self.max_length_bias,
            (1 - share) * self.max_step_bias,
        )

    def exceeded(self, figures: CaseFigures) -> list[str]:
        """Which limits the figures exceed, in words; empty if none."""
        if figures.failed:
            return [figures.failed]
        found = []
        if figures.staleness_max > self.max_staleness:
            found.append(f"staleness {figures.staleness_max} above {self.max_staleness}")
        for said, value, limit in (
            ("length bias", figures.length_bias, self.max_length_bias),
            ("step bias", figures.step_bias, self.max_step_bias),
        ):
            if value > limit + 1e-9:
                found.append(f"{said} {value:.3f} above {limit:g}")
        return found

    def excess(self, figures: CaseFigures) -> float:
        """By how much the figures exceed all limits together; 0 if none."""
        return (
            max(0, figures.staleness_max - self.max_staleness)
            + max(0.0, figures.length_bias - self.max_length_bias)
            + max(0.0, figures.step_bias - self.max_step_bias)
        )


def together(figures: Sequence[CaseFigures]) -> CaseFigures:
    """Means over cases, of staleness the maximum. Failed if it failed in any case."""
    for one in figures:
        if one.failed:
            return one
    means: dict[str, Any] = {
        name: mean([getattr(one, name) for one in figures])
        for name in CaseFigures.__struct_fields__
        if name not in ("staleness_max", "failed")
    }
    return CaseFigures(staleness_max=max(one.staleness_max for one in figures), **means)
