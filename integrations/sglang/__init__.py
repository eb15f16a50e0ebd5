"""SGLang servers as instances, and instances whose engine is found out when they are asked."""

from rollout_sched.integrations.sglang import protocol
from rollout_sched.integrations.sglang.instance import EngineInstance

__all__ = ["EngineInstance", "protocol"]
