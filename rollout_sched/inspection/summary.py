"""Computes the figures of a journal, as in the report of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollout_sched.figures import count, percent, seconds
from rollout_sched.inspection.recording import Observer, Recording
from rollout_sched.metrics import Metrics
from rollout_sched.metrics.fold import Folded
from rollout_sched.metrics.outages import DirectFold, OutageFold

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


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A label and a text for each figure; an indented label is part of the one above."""
    idle = found["idle_bubble_by_cause"]
    direct, outages = found["direct"], found["outages"]
    shown = [
        ("length", seconds(found["total_s"])),
        ("batches", count(found["steps"])),
        ("samples delivered", count(found["samples_delivered"])),
        ("tokens/s generated", count(found["tokens_per_s"])),
        ("tokens/s delivered", count(found["accepted_tokens_per_s"])),
        ("tokens discarded", count(found["discarded_tokens"])),
        ("tokens prefilled again", count(found["reprefilled_tokens"])),
        ("t50 of a step", seconds(found["t50_s"])),
        ("t90", seconds(found["t90_s"])),
        ("t99", seconds(found["t99_s"])),
        ("trainer waits", seconds(found["trainer_wait_s"])),
        ("staleness, mean", f"{found['staleness_mean']:.2f}"),
        ("staleness, most", count(found["staleness_max"])),
        ("idle", percent(found["idle_bubble"])),
        *((f"  {cause.replace('_', ' ')}", percent(share)) for cause, share in idle.items()),
        ("preemptions", count(found["preemptions"])),
        ("instances lost", count(outages["instances_lost"])),
        ("attempts failed", count(outages["failed_attempts"])),
        ("prompts failed", count(outages["failed_prompts"])),
    ]
    if direct["submitted"]:
        shown += [
            ("requests of clients", count(direct["submitted"])),
            ("  answered", count(direct["answered"])),
            ("  withdrawn", count(direct["withdrawn"])),
            ("  failed", count(direct["failed"])),
            ("  latency p50", seconds(direct["latency_p50_s"])),
            ("  latency p99", seconds(direct["latency_p99_s"])),
        ]
    return shown
