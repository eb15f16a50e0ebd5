"""The state of a scheduler, for people and programs that ask."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.groups import HERE
from rollout_sched.core.view import SchedulerView


def scheduler_state(view: SchedulerView) -> dict[str, Any]:
    """Its queues, versions and anomalies. `joined` are the instances that belong to the fleet."""
    run = view.run
    return {
        "version": run.version,
        "fleet_version": run.fleet_version,
        "prompts_per_step": run.prompts_per_step,
        "requests": {
            "in_flight": view.in_flight,
            "waiting": view.waiting,
            "parked": view.parked,
        },
        "sessions": {"known": view.sessions, "moves": view.session_moves},
        "groups": {
            **{str(state): view.groups(state) for state in HERE},
            "delivered": run.delivered,
        },
        "batches": run.batches,
        "in_batch": run.in_batch,
        "trainer_waiting": run.trainer_waiting,
        "closed": run.closed,
        "joined": len(view.instances),
        "anomalies": dict(view.anomalies),
    }
