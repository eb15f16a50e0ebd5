"""A scheduler and its fronts as actors of a Ray cluster (`rollout-sched ray up`).

Ray has the nodes, names, placement, restarts and batches (object references); frames between
scheduler and fronts go over connections of our own (`rollout_sched.link`), which cost a fiftieth of
an actor's call. What imports Ray does so where it is used.
"""
