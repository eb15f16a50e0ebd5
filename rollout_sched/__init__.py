"""Rollout scheduling for RL post-training on vLLM fleets: one core, live and in replay.

    from rollout_sched import Prompt, Reload, RolloutScheduler

The names of `__all__` are the public API. Each is imported when it is first asked for, so that what
needs only some of them, such as `rollout-sched --version`, does not import the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_sched.client import (
        Applied,
        Batch,
        BlockingRollouts,
        Prompt,
        Reload,
        RolloutScheduler,
        Sample,
        Trajectory,
        Transfer,
    )
    from rollout_sched.config import load_policy
    from rollout_sched.core import actions, events
    from rollout_sched.core.errors import CallerError, RolloutError
    from rollout_sched.core.scheduler import Scheduler

    __version__: str

__all__ = [
    "Applied",
    "Batch",
    "BlockingRollouts",
    "CallerError",
    "Prompt",
    "Reload",
    "RolloutError",
    "RolloutScheduler",
    "Sample",
    "Scheduler",
    "Trajectory",
    "Transfer",
    "__version__",
    "actions",
    "events",
    "load_policy",
]

#: Where a name is, if not in the client.
_ELSEWHERE = {
    "CallerError": "core.errors",
    "RolloutError": "core.errors",
    "Scheduler": "core.scheduler",
    "actions": "core",
    "events": "core",
    "load_policy": "config",
}

if not TYPE_CHECKING:  # a type checker would take every name for one that is found here

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "__version__":
            from importlib.metadata import version

            value = version("rollout-sched")
        else:
            value = getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'client')}"), name)
        globals()[name] = value  # not asked again
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
