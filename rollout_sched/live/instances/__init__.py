"""instances"""

from rollout_sched.live.instances.supervisor import InstanceSupervisor
from rollout_sched.live.instances.versions import THROUGH_US, FleetVersions

__all__ = [
    "THROUGH_US",
    "FleetVersions",
    "InstanceSupervisor",
]
