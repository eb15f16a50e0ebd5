"""How long a burst took, and what of that was the writing of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from rollout_sched.calibration.bursts import SHORT, Burst


class BurstTime(NamedTuple):
    """Seconds from the first request to the first answer, and to the last."""

    first_s: float
    last_s: float


def writing_s(times: Mapping[Burst, Iterable[BurstTime]]) -> float:
    """Seconds that each token of an answer takes beside the engine, where answers that come with
    the same step are written one after the other: by how much more the last of them is later than
    the first, the longer they are. 0 where no two lengths were asked for.

    The two longest of the most at once tell: with short ones it is how requests came, one after the
    other, that keeps the last answer back. Prompts are the shortest, so that one step ends all.
    """
    alike = [burst for burst in times if burst.waves == 1 and burst.prompt == SHORT]
    most = max((burst.batch for burst in alike), default=1)
    *_, shorter, longer = [None, None, *sorted(burst for burst in alike if burst.batch == most)]
    if most == 1 or shorter is None or longer is None:
        return 0.0
    later_s = [
        median(time.last_s - time.first_s for time in times[burst]) / (most - 1)
        for burst in (shorter, longer)
    ]
    return max((later_s[1] - later_s[0]) / (longer.new - shorter.new), 0.0)
