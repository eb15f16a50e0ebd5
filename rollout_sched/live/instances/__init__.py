"""The instances of a fleet, each with its supervisor."""

from rollout_sched.live.instances.attempts import AttemptIndex, InFlight
from rollout_sched.live.instances.supervisor import InstanceSupervisor
from rollout_sched.live.instances.versions import THROUGH_US, FleetVersions

__all__ = [
    "THROUGH_US",
    "AttemptIndex",
    "FleetVersions",
    "InFlight",
    "InstanceSupervisor",
]
