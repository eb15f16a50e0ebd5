"""The scheduler: events in, actions out, and nothing else."""

from rollout_sched.core import errors, scheduler
from rollout_sched.core.model import actions, events, model, records, request_ids, roles
from rollout_sched.core.restart.facts import FactRecorder, FoldedFacts
from rollout_sched.core.state import groups
from rollout_sched.core.view import SchedulerView

__all__ = [
    "FactRecorder",
    "FoldedFacts",
    "SchedulerView",
    "actions",
    "errors",
    "events",
    "groups",
    "model",
    "records",
    "request_ids",
    "roles",
    "scheduler",
]
