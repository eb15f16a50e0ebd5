"""How patient the driver is with instances."""

from __future__ import annotations

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All times in seconds.

    poll_s             between two looks at an instance's gauges
    control_timeout_s  for a poll, a pause, a resume (vLLM with busy cores took 8.7 s)
    update_timeout_s   for bringing weights to an instance
    misses             polls in a row without an answer until the instance counts as lost
    stall_s            without a new token, though requests run, until it counts as lost
    forgotten_s        how long it may report nothing to do while we wait for its answers
    attempt_timeout_s  for a whole attempt; 0: none, for long answers take what they take
    abort_timeout_s    how long an interrupted attempt may go on before it is given up
    stream_s           how often the core hears how far streams are; 0: only when one breaks off
    """

    poll_s: Positive = 1.0
    control_timeout_s: Positive = 15.0
    update_timeout_s: Positive = 600.0
    misses: Annotated[int, msgspec.Meta(ge=1)] = 3
    stall_s: Positive = 60.0
    forgotten_s: Positive = 10.0
    attempt_timeout_s: Seconds = 0.0
    abort_timeout_s: Positive = 30.0
    stream_s: Seconds = 0.0


DEFAULTS = Settings()
