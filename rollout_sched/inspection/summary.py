"""The figures of a journal, as the replay's report has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollout_sched.inspection.recording import Observer, Recording
from rollout_sched.metrics import Metrics
from rollout_sched.metrics.direct_requests import DirectFold
from rollout_sched.metrics.folded import Folded
from rollout_sched.metrics.outages import OutageFold

SCHEMA = "rollout-sched-journal-summary/1"


def summary(
    recording: Recording, metrics: Metrics | None = None, also: Iterable[Observer] = ()
) -> dict[str, Any]:
    """Times in seconds, shares from 0 to 1. The occupancy bubble is of the instances' slots: what
    the trainer's batch was to be is not in a journal, nor are the lengths that it was offered.

    `metrics`: those that are folded; None for fresh ones. `also`: who is shown the journal too.
    """
    slots = recording.slots()
    metrics = metrics or metrics_of(slots)
    direct, outages = DirectFold(), OutageFold()
    total_s = recording.tell([metrics.observe, Folded(direct, outages).observe, *also])
    figures: dict[str, Any] = msgspec.to_builtins(metrics.summary(total_s), str_keys=True)
    del figures["length_bias"]
    return {
        "schema": SCHEMA,
        "policy": recording.header.policy,
        "instances": len(slots),
        **figures,
        "direct": msgspec.to_builtins(direct.figures()),
        "outages": msgspec.to_builtins(outages.figures(total_s)),
        "per_step": [msgspec.to_builtins(step, str_keys=True) for step in metrics.steps],
    }


def metrics_of(slots: Mapping[str, int]) -> Metrics:
    """For a journal of instances with so many slots each."""
    return Metrics(max(slots.values(), default=1))
