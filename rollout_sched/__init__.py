"""Rollout scheduling for RL post-training on vLLM fleets: one core, live and in replay."""

from importlib.metadata import version

from rollout_sched.config import ConfigError, PolicyFile, load_policy, parse_policy
from rollout_sched.core.model import actions, events
from rollout_sched.core.model.errors import CallerError, PolicyError, RolloutError
from rollout_sched.core.scheduler import Scheduler

__version__ = version("rollout-sched")

__all__ = [
    "CallerError",
    "ConfigError",
    "PolicyError",
    "PolicyFile",
    "RolloutError",
    "Scheduler",
    "__version__",
    "actions",
    "events",
    "load_policy",
    "parse_policy",
]
