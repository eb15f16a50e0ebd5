"""Formats the figures of a journal as labelled text."""

from __future__ import annotations

from typing import Any

from rollout_sched.simulators.replay.report_tables import count, percent, seconds


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
