"""Which request goes where."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from rollout_sched.core.model.errors import PolicyError
from rollout_sched.core.model.events import (
    BatchRequested,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    RequestFinished,
    RequestSubmitted,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.core.model.model import RequestState
from tests.core.told import (
    BIG,
    FULLY_ASYNC,
    LIMIT,
    PROMPT,
    Told,
    dispatched,
    with_roles,
)


class TestSessions:
    """Two trajectories at once may have their KV on an instance."""

    TWO: ClassVar[dict[str, Any]] = {"use": "aimd_concurrency", "longest": BIG // 2}

    def test_who_is_between_two_turns_keeps_a_place(self) -> None:
        told = Told(admission=self.TWO)
        told.submit("a", samples=3)
        assert dispatched(told(BatchRequested())) == ["a/0", "a/1"]
        assert told(TurnFinished("a/0", 1, 5)) == []
        assert told.instance("i0").sessions == 2
        assert dispatched(told(ToolReturned("a/0", 1, 5))) == ["a/0"], "before a/2, which is new"
        assert dispatched(told(RequestFinished("a/0", 3, 5))) == ["a/2"]

    def test_a_trajectory_that_ends_with_a_tool_leaves_its_place(self) -> None:
        told = Told(admission=self.TWO)
        told.submit("a", samples=3)
        told(BatchRequested(), TurnFinished("a/0", 1, 5))
        assert dispatched(told(TrajectoryEnded("a/0", 1))) == ["a/2"]

    def test_a_group_that_fails_leaves_its_places(self) -> None:
        told = Told(2, admission=self.TWO)
        told.submit("a", samples=2)
        told.submit("b")
        told(BatchRequested(), TurnFinished("a/0", 1, 5), TurnFinished("a/1", 2, 5))
        assert dispatched(told(TrajectoryEnded("a/0", 1, "failed"))) == ["b/0"]
        assert told.instance("i0").sessions == 1

    def test_another_instance_that_takes_new_ones_is_found(self) -> None:
        told = Told(instances=2, slots=2, admission=self.TWO)
        told.submit("a", samples=5)
        told(BatchRequested(), TurnFinished("a/0", 1, 5))
        told(RequestFinished("a/1", 2, 5))
        assert told.running == ["a/2", "a/3", "a/4"]
        assert [told.instance(i).in_flight for i in ("i0", "i1")] == [1, 2]

    def test_the_home_that_is_lost_is_nobodys_home(self) -> None:
        told = Told(slots=1, admission=self.TWO)
        told.submit("a", samples=2)
        told(BatchRequested(), TurnFinished("a/0", 1, 5))
        assert told.running == ["a/1"]
        told(ToolReturned("a/0", 1, 5))
        assert told.request("a/0").home is told.instance("i0"), "it waits for the slot"
        told(InstanceLost("i0"))
        assert told.request("a/0").home is None
        assert dispatched(told(InstanceJoined("i1", 2, BIG))) == ["a/0", "a/1"]

    def test_who_returns_to_a_full_cache_gives_its_kv_up(self) -> None:
        told = Told(admission={"use": "session_cap", "fill": 30 / BIG, "overfill": 30 / BIG})
        told.submit("a", samples=2)
        told(BatchRequested(), TurnFinished("a/0", 1, 30), InstanceReported("i0", 1, 0, 0.0))
        assert told(ToolReturned("a/0", 1, 5)) == []
        assert told.request("a/0").home is None
        assert dispatched(told(RequestFinished("a/1", 2, 5))) == ["a/0"]

    def test_a_report_that_lets_more_begin_is_acted_on(self) -> None:
        told = Told(admission={"use": "session_cap", "fill": 1.0})
        told.submit("a", samples=1)
        told(BatchRequested(), InstanceReported("i0", 1, 0, 0.9))
        told(RequestSubmitted("d", "", PROMPT, LIMIT))
        assert told.running == ["a/0"]
        assert dispatched(told(InstanceReported("i0", 1, 0, 0.4))) == ["d"]


def test_routing_to_a_closed_instance() -> None:
    told = Told(instances=2, slots=1, **FULLY_ASYNC)
    told.submit("a")
    full = told.instance("i0")

    class Stubborn:
        def load(self, instance: Any) -> int:
            return 0

        def choose(self, request: Any, fleet: Any) -> Any:
            return full

    told.scheduler.roles.routing = Stubborn()
    with pytest.raises(PolicyError, match="which is not open"):
        told.submit("b")


def test_routing_may_let_a_request_wait() -> None:
    class Patient:
        def load(self, instance: Any) -> int:
            return 0

        def choose(self, request: Any, fleet: Any) -> Any:
            return None

    told = with_roles(Told(instances=0), routing=Patient())
    told.submit("a")
    told(InstanceJoined("i0", 8, BIG))
    assert told(BatchRequested()) == []
    assert told.request("a/0").state is RequestState.WAITING
