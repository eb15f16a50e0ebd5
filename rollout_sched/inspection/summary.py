"""Computes the figures of a journal, as in the report of a replay."""

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
    """The figures: times in seconds, shares from 0 to 1. The occupancy bubble refers to the
    instances' slots, because a journal has neither the reference batch nor the offered lengths.

    `metrics`: the metrics to fold; None for new ones. `also`: further observers of the journal.
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
    """Metrics for a journal whose instances have these slots."""
    return Metrics(max(slots.values(), default=1))
