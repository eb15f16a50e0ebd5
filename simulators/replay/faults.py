"""Faults: what happens to instances of a scenario, and which attempts give no answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import Blame
from rollout_sched.simulators.replay.event_queue import EventQueue

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Fault(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="what", kw_only=True
):
    """Something that happens at `at_s` seconds."""

    at_s: Seconds


class Lost(_Fault, frozen=True, tag="lost"):
    """An instance dies. What it held is gone but for what had been streamed of it.

    `returns_after_s` seconds later it joins again, with the weights that it started with; 0: never.
    """

    instance: Number
    returns_after_s: Seconds = 0.0


class Leaving(_Fault, frozen=True, tag="leaving"):
    """An instance is drained: it finishes what it has, takes nothing new, and goes.

    `returns_after_s` seconds after it has gone it joins again; 0: never.
    """

    instance: Number
    returns_after_s: Seconds = 0.0


class Joins(_Fault, frozen=True, tag="joins"):
    """An instance is not there before `at_s`."""

    instance: Number


class Failing(_Fault, frozen=True, tag="failing"):
    """A share of the attempts that are sent to an instance give no answer.

    instance  all of them if it is not given
    at_s      from then on ...
    for_s     ... for so long; 0: to the end
    share     of the attempts sent there meanwhile, by seeded chance
    after_s   seconds from its dispatch until an attempt fails, if it has not ended before
    blame     as the driver would tell it: "instance" for one that was never reached, "request" for
              one that no instance would take, "unclear" for everything between
    """

    instance: Number | None = None
    for_s: Seconds = 0.0
    share: Share = 1.0
    after_s: Seconds = 0.0
    blame: Blame = "unclear"
    seed: int = 0

    @property
    def ends_everything(self) -> bool:
        """Attempts that no instance got are made again and again, for ever."""
        always = not self.for_s and self.share == 1
        return always and self.instance is None and self.blame == "instance"

    @property
    def reason(self) -> str:
        return "made to fail by the scenario"


class ToolsFailing(_Fault, frozen=True, tag="tools_failing"):
    """A share of the tools that return between `at_s` and `for_s` later (0: to the end) fail, and
    with each of them its trajectory's group."""

    for_s: Seconds = 0.0
    share: Share = 1.0
    seed: int = 0


class SchedulerRestarts(_Fault, frozen=True, tag="scheduler_restarts"):
    """The scheduler dies, and another one goes on from what had been written down by then.

    It does so at once. Attempts, and orders to instances, have broken off; tools and the trainer go
    on, clients ask again.
    """


Fault = Lost | Leaving | Joins | Failing | ToolsFailing | SchedulerRestarts
KINDS: dict[str, type[Fault]] = {
    "lost": Lost,
    "leaving": Leaving,
    "joins": Joins,
    "failing": Failing,
    "tools_failing": ToolsFailing,
    "scheduler_restarts": SchedulerRestarts,
}


def name_of(instance: int) -> str:
    """What the instance with this number is called."""
    return f"instance-{instance}"


class Failures:
    """Which attempts and tools fail: the same in every run of a scenario, whoever runs it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._failing = [
            (None if fault.instance is None else name_of(fault.instance), fault)
            for fault in faults
            if isinstance(fault, Failing)
        ]
        self._tools_failing = [fault for fault in faults if isinstance(fault, ToolsFailing)]

    def of(self, action: Dispatch, now: float) -> Failing | None:
        """What makes the attempt fail that is dispatched now, if anything does."""
        for number, (name, fault) in enumerate(self._failing):
            if name is not None and name != action.instance:
                continue
            if _strikes(fault, f"{number}/{action.attempt}", now):
                return fault
        return None

    def of_tool(self, attempt: int, now: float) -> bool:
        """Whether the tool fails that returns now, after the turn that the attempt made."""
        for number, fault in enumerate(self._tools_failing):
            if _strikes(fault, f"tool/{number}/{attempt}", now):
                return True
        return False


def _strikes(fault: Failing | ToolsFailing, whom: str, now: float) -> bool:
    if now < fault.at_s or (fault.for_s and now >= fault.at_s + fault.for_s):
        return False
    return random.Random(f"{fault.seed}/{whom}").random() < fault.share


class FaultyFleet(Protocol):
    """What faults happen to."""

    def join(self, name: str) -> None: ...
    def lose(self, name: str, returns_after_s: float = ...) -> None: ...
    def leave(self, name: str, returns_after_s: float = ...) -> None: ...


class Faults:
    """The instances' faults and the scheduler's, each when its time has come. What has gone is not
    lost again. `restart`: called when the scheduler restarts."""

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
        """Instances that are not there from the start."""
        return {name_of(fault.instance) for fault in self._faults if isinstance(fault, Joins)}

    def start(self) -> None:
        for fault in self._faults:
            if not isinstance(fault, Failing | ToolsFailing):
                self._queue.at(fault.at_s, self._happen, fault)

    def _happen(self, fault: Lost | Leaving | Joins | SchedulerRestarts) -> None:
        if isinstance(fault, SchedulerRestarts):
            self._restart()
            return
        name = name_of(fault.instance)
        if isinstance(fault, Lost):
            self._fleet.lose(name, fault.returns_after_s)
        elif isinstance(fault, Leaving):
            self._fleet.leave(name, fault.returns_after_s)
        else:
            self._fleet.join(name)
