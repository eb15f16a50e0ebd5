"""What was measured so far, by burst, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from statistics import median, quantiles

from rollout_sched.calibration.burst_steps import steps_of
from rollout_sched.calibration.bursts import Burst
from rollout_sched.simulators.instance.cost_fit import Fit, Span, fit_spans


class Measurements:
    """Seconds of bursts, each measured several times."""

    def __init__(self) -> None:
        self.seconds: dict[Burst, list[float]] = {}

    def add(self, burst: Burst, seconds: list[float]) -> None:
        self.seconds.setdefault(burst, []).extend(seconds)

    @property
    def whole(self) -> dict[Burst, list[float]]:
        """Those of which there is any."""
        return {burst: seconds for burst, seconds in self.seconds.items() if seconds}

    @property
    def medians(self) -> dict[Burst, float]:
        """Of each burst: what a neighbour on the machine disturbs now and then is left out."""
        return {burst: median(seconds) for burst, seconds in self.whole.items()}

    @property
    def spread(self) -> float | None:
        return spread(self.whole.values())

    def fit(self, slots: int, max_num_batched_tokens: int, leave_out: Collection[str] = ()) -> Fit:
        """The constants that explain the medians best; those named in `leave_out` are 0. Raises
        ValueError if nothing was measured."""
        return fit_spans(
            (
                Span(steps_of(burst, slots, max_num_batched_tokens), seconds, 1, burst.answered)
                for burst, seconds in self.medians.items()
            ),
            leave_out=leave_out,
        )


def spread(each: Iterable[list[float]]) -> float | None:
    """Half the distance between the quartiles over the median of a middling one of them; None
    where nothing was measured three times."""
    often = [seconds for seconds in each if len(seconds) >= 3]
    return median(map(_half_width, often)) if often else None


def _half_width(seconds: list[float]) -> float:
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / (2 * middle)
