"""The wire protocol of vLLM's servers, for both live paths.

The gateway passes clients' calls through, the driver makes its own calls; this room has the facts
that both need, once. Nothing in it does any I/O.
"""

from rollout_sched.integrations.vllm.protocol import answers, endpoints, refusals

__all__ = [
    "answers",
    "endpoints",
    "refusals",
]
