"""vLLM instances for the live driver, over HTTP and in process, and weight loaders."""

from rollout_sched.integrations.vllm import weight_updates, weights
from rollout_sched.integrations.vllm.detection import EngineLimits, read_limits
from rollout_sched.integrations.vllm.http_instance import HttpInstance, checked_url
from rollout_sched.integrations.vllm.in_process import EngineStep, SteppedEngine
from rollout_sched.integrations.vllm.orders import TRACE_LINE

__all__ = [
    "TRACE_LINE",
    "EngineLimits",
    "EngineStep",
    "HttpInstance",
    "SteppedEngine",
    "checked_url",
    "read_limits",
    "weight_updates",
    "weights",
]
