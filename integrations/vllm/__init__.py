"""vLLM instances for the live driver, over HTTP and in process, and weight loaders."""

from rollout_sched.integrations.vllm import weight_updates, weights
from rollout_sched.integrations.vllm.calls import EngineLimits, tokenized
from rollout_sched.integrations.vllm.control import ServerControl
from rollout_sched.integrations.vllm.detection import Findings, served_models
from rollout_sched.integrations.vllm.dialects import Chunk, Dialect
from rollout_sched.integrations.vllm.http_instance import HttpInstance, checked_url
from rollout_sched.integrations.vllm.in_process import EngineStep, SteppedEngine
from rollout_sched.integrations.vllm.orders import TRACE_LINE

__all__ = [
    "TRACE_LINE",
    "Chunk",
    "Dialect",
    "EngineLimits",
    "EngineStep",
    "Findings",
    "HttpInstance",
    "ServerControl",
    "SteppedEngine",
    "checked_url",
    "served_models",
    "tokenized",
    "weight_updates",
    "weights",
]
