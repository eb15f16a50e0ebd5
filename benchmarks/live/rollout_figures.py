"""Batch times, their ratios to vllm-router's, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.live.arms import REFERENCE
from benchmarks.live.figures import Spread, markdown, spread

#: Seconds by arm, batch by batch, of the simulation.
Replayed = dict[str, list[float]]

HEAD = (
    "arm",
    "last answer s",
    "ratio",
    "90 % s",
    "ratio",
    "replayed s",
    "router CPU s",
    "failures",
)


class BatchTime(msgspec.Struct, frozen=True):
    """One batch through one arm; seconds are simulated.

    busiest: share of the machine in use in the busiest second; busy: on average; foreign: by
    others, on average.
    router_cpu_s: CPU seconds of the router for the whole batch.
    """

    arm: str
    repetition: int
    completion_s: float
    t90_s: float
    failures: list[str]
    busy: float
    busiest: float
    foreign: float
    router_cpu_s: float


def ratios(told: Sequence[BatchTime], arm: str, field: str) -> Spread | None:
    """The arm's time divided by vllm-router's, batch by batch; None if one is missing."""
    reference = {one.repetition: getattr(one, field) for one in told if one.arm == REFERENCE}
    found = [
        getattr(one, field) / reference[one.repetition]
        for one in told
        if one.arm == arm and one.repetition in reference
    ]
    return spread(found) if found else None


def table(told: Sequence[BatchTime], replayed: Replayed) -> list[str]:
    """One row per arm: times and their ratios, median (min-max)."""
    rows: list[Sequence[str]] = [HEAD]
    for arm in dict.fromkeys(one.arm for one in told):
        mine = [one for one in told if one.arm == arm]
        rows.append(
            [
                arm,
                spread([one.completion_s for one in mine]).show(0),
                _ratio(ratios(told, arm, "completion_s")),
                spread([one.t90_s for one in mine]).show(0),
                _ratio(ratios(told, arm, "t90_s")),
                spread(replayed[arm]).show(0) if arm in replayed else "-",
                f"{statistics.median(one.router_cpu_s for one in mine):.2f}",
                str(sum(len(one.failures) for one in mine)),
            ]
        )
    return markdown(rows)


def _ratio(found: Spread | None) -> str:
    return found.show(2) if found else "-"
