"""A scheduler and its fronts as actors of a Ray cluster (`rollout-sched ray up`).

Ray provides the nodes, names, placement, restarts and the transport of batches (object references).
Frames between scheduler and fronts use connections of our own (`rollout_sched.link`), which cost a
fiftieth of an actor call. Modules import Ray inside the functions that use it.
"""

from rollout_sched.integrations.ray import actor_calls, cluster, command, deployment

__all__ = ["actor_calls", "cluster", "command", "deployment"]
