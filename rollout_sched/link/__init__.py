"""Several fronts, each in its own process, before one scheduler."""

from rollout_sched.link.front import FrontCalls
from rollout_sched.link.host import Hub
from rollout_sched.link.transport import LinkDialler, LinkListener, SchedulerPlace

__all__ = [
    "FrontCalls",
    "Hub",
    "LinkDialler",
    "LinkListener",
    "SchedulerPlace",
]
