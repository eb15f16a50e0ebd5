"""Faults of a scenario: what happens to instances, attempts, tools and the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Annotated, Protocol

import msgspec

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Blame
from rollout_sched.core.model.records import Signed, Size
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.traces.model import Duration as Seconds

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Fault(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="what", kw_only=True
):
    """Something that happens after `at_s` seconds."""

    at_s: Seconds


class Lost(_Fault, frozen=True, tag="lost"):
    """An instance dies. Its requests are lost, except for tokens already streamed.

    It joins again after `returns_after_s` seconds, with its initial weights; 0: never.
    """

    instance: Size
    returns_after_s: Seconds = 0.0


class Leaving(_Fault, frozen=True, tag="leaving"):
    """An instance is drained: it finishes its requests, takes no new ones, and leaves.

    It joins again `returns_after_s` seconds after it has left; 0: never.
    """

    instance: Size
    returns_after_s: Seconds = 0.0


class Joins(_Fault, frozen=True, tag="joins"):
    """An instance that joins at `at_s`, not at the start."""

    instance: Size


class Slow(_Fault, frozen=True, tag="slow"):
    """Every engine step of an instance takes `factor` times as long, for `for_s` seconds (0: to the
    end), also after the instance has been away. Where several overlap, their factors multiply."""

    instance: Size
    for_s: Seconds = 0.0
    factor: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 2.0


class Failing(_Fault, frozen=True, tag="failing"):
    """A share of the attempts sent to an instance fail.

    instance  every instance if not given
    at_s      from this time ...
    for_s     ... for this long; 0: to the end
    share     of the attempts sent to it in that time, by seeded chance
    after_s   seconds from its dispatch until an attempt fails, if it has not ended before
    blame     as the driver would report it: "instance" if it was never reached, "request" if no
              instance would take it, "unclear" for everything between
    """

    instance: Size | None = None
    for_s: Seconds = 0.0
    share: Share = 1.0
    after_s: Seconds = 0.0
    blame: Blame = "unclear"
    seed: Signed = 0

    @property
    def ends_everything(self) -> bool:
        """Attempts that never reach an instance are retried forever."""
        always = not self.for_s and self.share == 1
        return always and self.instance is None and self.blame == "instance"

    @property
    def reason(self) -> str:
        return "made to fail by the scenario"


class ToolsFailing(_Fault, frozen=True, tag="tools_failing"):
    """A share of the tools that return between `at_s` and `for_s` later (0: to the end) fail; the
    group of each such trajectory fails too."""

    for_s: Seconds = 0.0
    share: Share = 1.0
    seed: Signed = 0


class SchedulerRestarts(_Fault, frozen=True, tag="scheduler_restarts"):
    """The scheduler dies, and a new one continues at once from the recorded facts.

    Attempts in flight fail, and orders to instances are dropped; tools and the trainer continue,
    and clients ask again.
    """


Fault = Lost | Leaving | Joins | Slow | Failing | ToolsFailing | SchedulerRestarts
KINDS: dict[str, type[Fault]] = {
    "lost": Lost,
    "leaving": Leaving,
    "joins": Joins,
    "slow": Slow,
    "failing": Failing,
    "tools_failing": ToolsFailing,
    "scheduler_restarts": SchedulerRestarts,
}


def name_of(instance: int) -> str:
    """The name of the instance with this number."""
    return f"instance-{instance}"


def slowdown(faults: Sequence[Fault], name: str, now: float) -> float:
    """How many times as long as usual the steps of this instance take now."""
    return prod(
        fault.factor
        for fault in faults
        if isinstance(fault, Slow) and name_of(fault.instance) == name and _is_active(fault, now)
    )


class Failures:
    """Which attempts and tools fail: the same in every run of a scenario, for every policy."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._failing = [
            (None if fault.instance is None else name_of(fault.instance), fault)
            for fault in faults
            if isinstance(fault, Failing)
        ]
        self._tools_failing = [fault for fault in faults if isinstance(fault, ToolsFailing)]

    def failure_of(self, action: Dispatch, now: float) -> Failing | None:
        """The fault that makes the attempt dispatched now fail, if any."""
        for number, (name, fault) in enumerate(self._failing):
            if name is not None and name != action.instance:
                continue
            if _strikes(fault, f"{number}/{action.attempt}", now):
                return fault
        return None

    def of_tool(self, attempt: int, now: float) -> bool:
        """Whether the tool that returns now fails; `attempt` made the turn before it."""
        for number, fault in enumerate(self._tools_failing):
            if _strikes(fault, f"tool/{number}/{attempt}", now):
                return True
        return False


def _strikes(fault: Failing | ToolsFailing, whom: str, now: float) -> bool:
    return _is_active(fault, now) and random.Random(f"{fault.seed}/{whom}").random() < fault.share


def _is_active(fault: Slow | Failing | ToolsFailing, now: float) -> bool:
    return fault.at_s <= now and not (fault.for_s and now >= fault.at_s + fault.for_s)


class FaultyFleet(Protocol):
    """The fleet as faults act on it."""

    def join(self, name: str) -> None: ...
    def lose(self, name: str, returns_after_s: float = ...) -> None: ...
    def leave(self, name: str, returns_after_s: float = ...) -> None: ...
    def slow(self, name: str) -> None: ...


class Faults:
    """Carries out the faults of instances and scheduler when they are due. An instance that is gone
    is not lost again. `restart`: called when the scheduler restarts."""

    def __init__(
        self,
        faults: Sequence[Fault],
        queue: EventQueue,
        fleet: FaultyFleet,
        restart: Callable[[], None],
    ) -> None:
        self._faults = tuple(faults)
        self._queue = queue
        self._fleet = fleet
        self._restart = restart

    @property
    def absent(self) -> set[str]:
        """Instances that are absent at the start."""
        return {name_of(fault.instance) for fault in self._faults if isinstance(fault, Joins)}

    def start(self) -> None:
        for fault in self._faults:
            if not isinstance(fault, Failing | ToolsFailing):
                self._queue.at(fault.at_s, self._happen, fault)
            if isinstance(fault, Slow) and fault.for_s:
                self._queue.at(fault.at_s + fault.for_s, self._happen, fault)

    def _happen(self, fault: Lost | Leaving | Joins | Slow | SchedulerRestarts) -> None:
        if isinstance(fault, SchedulerRestarts):
            self._restart()
            return
        name = name_of(fault.instance)
        if isinstance(fault, Lost):
            self._fleet.lose(name, fault.returns_after_s)
        elif isinstance(fault, Leaving):
            self._fleet.leave(name, fault.returns_after_s)
        elif isinstance(fault, Slow):
            self._fleet.slow(name)
        else:
            self._fleet.join(name)
