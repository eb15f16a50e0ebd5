"""How long a burst took, and what of that was the writing of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from rollout_sched.calibration.bursts import SHORT, Burst


class BurstTime(NamedTuple):
    """Seconds from the first request to the first answer, and to the last."""

    first_s: float
    last_s: float


def writing_s(times: Mapping[Burst, Iterable[BurstTime]]) -> float:
    """Seconds that each token of an answer takes beside the engine, where answers that come with
    the same step are written one after the other: by how much more the last of them is later than
    the first, the longer they are. 0 where no two were asked for at once.

    Bursts of the shortest prompts tell: those of long ones may end in several steps. What is left
    of one that makes a single token is how the requests came, not how answers go.
    """
    rows = [
        (1.0, burst.new, median(time.last_s - time.first_s for time in found) / (burst.batch - 1))
        for burst, found in times.items()
        if burst.waves == 1 and burst.batch > 1 and burst.prompt == SHORT
    ]
    if not rows:
        return 0.0
    table = np.asarray(rows)
    _, token_s = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)[0]
    return max(float(token_s), 0.0)
