"""What vLLM's servers say and want to hear: every fact about their wire, of both live paths.

The gateway passes clients' calls through, the driver makes calls of its own; what they share with a
server stands here, once. Nothing here talks to anybody.
"""
