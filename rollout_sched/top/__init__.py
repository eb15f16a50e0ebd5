"""`rollout-sched top`: a gateway at work, in a terminal."""
