"""control_plane"""

from rollout_sched.integrations.gateway.control_plane.gateway import NewInstance

__all__ = ["NewInstance"]
