"""The wire protocol of vLLM's servers, for both live paths.

The gateway passes clients' calls through, the driver makes its own calls; the protocol facts that
both need are defined here, once. Nothing here does any I/O.
"""

from rollout_sched.integrations.vllm.protocol import answers, endpoints, refusals

__all__ = [
    "answers",
    "endpoints",
    "refusals",
]
