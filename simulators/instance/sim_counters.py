"""Counters of a simulated instance since it started."""

from __future__ import annotations


class SimCounters:
    """All except the first two are in tokens.

    prefill_tokens      context tokens that were computed, including re-prefill
    cached_tokens       context tokens that were found in the prefix cache instead
    reprefilled_tokens  those of prefill_tokens that had been computed before: preempted or resumed
    """

    __slots__ = (
        "admissions",
        "cached_tokens",
        "generated_tokens",
        "preemptions",
        "prefill_tokens",
        "reprefilled_tokens",
    )

    def __init__(self) -> None:
        self.admissions = 0
        self.preemptions = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.reprefilled_tokens = 0
        self.generated_tokens = 0
