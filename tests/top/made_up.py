"""What a gateway may say of itself, with figures as large as they get."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_sched.top import Document

GROUPS = {"fresh": 12_345, "active": 512, "spent": 0, "deferred": 77, "complete": 31}


def instance(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"id-{number}",
        "url": f"http://10.0.0.{number}:8000",
        "status": "serving",
        "reason": "",
        "version": 128,
        "in_flight": 250 - number,
        "slots": 256,
        "kv_tokens": 10**6,
        "held": False,
        "leaving": False,
        "running": 200,
        "waiting": 50,
        "kv_usage": 0.987,
        "generated_tokens": 10**9 * number,
        **changes,
    }


def step(version: int) -> dict[str, Any]:
    return {
        "version": version,
        "end_s": 100.0 * version,
        "span_s": 1234.5,
        "rollout_s": 1234.5,
        "t50_s": 234.5,
        "t90_s": 678.9,
        "t99_s": 1199.9,
        "trainer_wait_s": 123.4,
        "samples": 8192,
        "tokens": 123_456_789,
        "discarded_tokens": 1_000_000,
        "max_staleness": 12,
        "idle_bubble": 0.876,
        "idle_by_cause": {"barrier": 0.5},
    }


def said(**changes: Any) -> dict[str, Any]:
    """As JSON has it."""
    away = instance(3, status="away", version=None, in_flight=0, waiting=None, kv_usage=None)
    away["reason"] = "it does not answer"
    return {
        "schema": "rollout-sched-live/1",
        "now": 5000.0,
        "watched_s": 3600.0,
        "policy": "best_async",
        "version": 129,
        "fleet_version": 128,
        "healthy": True,
        "broken": None,
        "requests": {"in_flight": 2048, "waiting": 12_345, "parked": 678},
        "groups": GROUPS,
        "batches": 128,
        "prompts_per_step": 512,
        "trainer_waiting": True,
        "waits_for": {"batch": "", "weights": "http://10.0.0.3:8000 to join"},
        "instances": [
            instance(1),
            instance(2, status="updating", held=True, leaving=True),
            away,
            *(instance(number) for number in range(4, 9)),
        ],
        "instance_s": {"busy": 6.0 * 3600, "idle": 1.5 * 3600, "updating": 0.5 * 3600},
        "step": {
            "number": 128,
            "elapsed_s": 789.0,
            "finished": 4321,
            "in_batch": 100,
            "complete": 31,
        },
        "steps": [step(version) for version in range(120, 129)],
        "staleness": {"0": 900, "1": 90, "4": 10},
        "waste": {"deferred": 12, "surplus": 1_234_567, "stale": 0},
        "changes": [
            {"at": 10.0 * n, "level": "info", "kind": "x", "text": f"change {n}"} for n in range(9)
        ]
        + [
            {
                "at": 4990.0,
                "level": "error",
                "kind": "lost",
                "text": "http://10.0.0.3:8000 was lost",
            }
        ],
        **changes,
    }


def document(**changes: Any) -> Document:
    return msgspec.convert(said(**changes), Document)
