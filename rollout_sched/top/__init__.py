"""`rollout-sched top`: the live state of a gateway in a terminal."""
