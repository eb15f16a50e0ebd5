"""A simulated vLLM 0.32 server: the simulated instance behind vLLM's HTTP endpoints."""

from rollout_sched.simulators.fake_instance import command

__all__ = [
    "command",
]
