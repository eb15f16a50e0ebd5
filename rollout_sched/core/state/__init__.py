"""The state of a run: fleet, groups, queues, progress."""
