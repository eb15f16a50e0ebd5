"""The HTTP entry to a fleet: `rollout-sched serve`, and the data plane alone as a front."""

from rollout_sched.integrations.gateway import options, serve
from rollout_sched.integrations.gateway.front_service import FrontService

__all__ = [
    "FrontService",
    "options",
    "serve",
]
