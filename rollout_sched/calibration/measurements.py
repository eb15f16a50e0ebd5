"""The measured times of bursts, and the figures computed from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from statistics import median, quantiles

from rollout_sched.calibration.burst_steps import steps_of
from rollout_sched.calibration.burst_times import BurstTime, writing_s
from rollout_sched.calibration.bursts import Burst
from rollout_sched.simulators.instance.cost_fit import Fit, MeasuredSpan, fit_spans


class Measurements:
    """Times of bursts, each measured several times."""

    def __init__(self) -> None:
        self.times: dict[Burst, list[BurstTime]] = {}

    def add(self, burst: Burst, times: list[BurstTime]) -> None:
        self.times.setdefault(burst, []).extend(times)

    @property
    def whole(self) -> dict[Burst, list[BurstTime]]:
        """The bursts that have measurements."""
        return {burst: times for burst, times in self.times.items() if times}

    @property
    def seconds(self) -> dict[Burst, list[float]]:
        """Seconds until the last answer, by burst."""
        return {burst: [time.last_s for time in times] for burst, times in self.whole.items()}

    @property
    def medians(self) -> dict[Burst, float]:
        """The median of each burst, which ignores occasional disturbances by other processes."""
        return {burst: median(seconds) for burst, seconds in self.seconds.items()}

    @property
    def spread(self) -> float | None:
        return spread(self.seconds.values())

    @property
    def writing_s(self) -> float:
        """Seconds per answer token, outside the engine."""
        return writing_s(self.whole)

    def fit(self, slots: int, max_num_batched_tokens: int, leave_out: Collection[str] = ()) -> Fit:
        """The constants that fit the medians best; those named in `leave_out` are 0. Raises
        ValueError if nothing was measured."""
        token_s = self.writing_s
        return fit_spans(
            (
                MeasuredSpan(
                    steps_of(burst, slots, max_num_batched_tokens),
                    max(seconds - token_s * burst.answered, seconds / 2),
                    calls=1,
                )
                for burst, seconds in self.medians.items()
            ),
            leave_out=leave_out,
        )


def spread(each: Iterable[list[float]]) -> float | None:
    """Half the interquartile range over the median: the median of this ratio over all bursts. None
    if nothing was measured three times."""
    often = [seconds for seconds in each if len(seconds) >= 3]
    return median(map(_half_width, often)) if often else None


def _half_width(seconds: list[float]) -> float:
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / (2 * middle)
