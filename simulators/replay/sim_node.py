"""An instance of the closed loop, and who has paused it."""

from __future__ import annotations

from collections import deque
from typing import Final

from rollout_sched.core.events import InstanceReported
from rollout_sched.simulators.instance.reference.instance import ReferenceInstance
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import PauseMode

INFINITY: Final = float("inf")


class SimNode:
    """A simulated instance under its name.

    due              when it is next advanced; older plans are void
    paused_by        who has paused it; it resumes when all of them have resumed it
    pausing          the owners of pauses that it has not confirmed yet, in order
    leaving          it was asked to leave
    returns_after_s  seconds from its release until it joins again; 0: never
    """

    __slots__ = ("due", "instance", "leaving", "name", "paused_by", "pausing", "returns_after_s")

    def __init__(self, name: str, instance: SimInstance | ReferenceInstance) -> None:
        self.name = name
        self.instance = instance
        self.due = INFINITY
        self.paused_by: set[str] = set()
        self.pausing: deque[str] = deque()
        self.leaving = False
        self.returns_after_s = 0.0

    def pause(self, owner: str, now: float, mode: PauseMode, clear_cache: bool) -> None:
        self.paused_by.add(owner)
        self.pausing.append(owner)
        self.instance.pause(now, mode, clear_cache)

    def resume(self, owner: str, now: float) -> bool:
        """Returns whether it resumes; False if somebody else still pauses it."""
        self.paused_by.discard(owner)
        if self.paused_by:
            return False
        self.instance.resume(now)
        return True

    def report(self) -> InstanceReported:
        """The result of a poll."""
        gauges = self.instance.gauges()
        return InstanceReported(
            self.name,
            gauges.running,
            gauges.waiting,
            gauges.kv_usage,
            gauges.preemptions,
            gauges.prefill_tokens,
            gauges.cached_tokens,
            gauges.reprefilled_tokens,
            gauges.generated_tokens,
        )
