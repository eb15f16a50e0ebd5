"""A scheduler and its fronts as actors of a Ray cluster (`rollout-sched ray up`).

Ray provides the nodes, names, placement, restarts and the transport of batches (object references).
Frames between scheduler and fronts use connections of our own (`rollout_sched.link`), which cost a
fiftieth of an actor call. Modules import Ray inside the functions that use it.
"""

from rollout_sched.integrations.ray import cluster, command, deployment
from rollout_sched.integrations.ray.client import OnRay, on_ray

__all__ = ["OnRay", "cluster", "command", "deployment", "on_ray"]
