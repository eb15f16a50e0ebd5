"""The duration of a burst, and the part of it in which its answers were written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from rollout_sched.calibration.bursts import SHORT, Burst


class BurstTime(NamedTuple):
    """Seconds from the first request to the first and to the last answer."""

    first_s: float
    last_s: float


def writing_s(times: Mapping[Burst, Iterable[BurstTime]]) -> float:
    """Seconds of writing per answer token, outside the engine. Answers of the same step are written
    one after the other, so the delay from the first answer to the last grows with their length; the
    growth gives the time per token. 0 unless two lengths were measured.

    It compares the two longest lengths of the largest batch: with short answers the delay comes
    from the arrival of the requests one after the other. It uses the shortest prompts, so that one
    step ends all requests.
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
