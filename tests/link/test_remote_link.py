"""An answer that a local scheduler gives at once comes as an order, if a caller still waits."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.link.protocol import CallTool, InstanceSuspected
from rollout_sched.link.remote_link import RemoteLink
from rollout_sched.live.ports import InstanceError, Outcome
from tests.link.wires import Shared

DISPATCH = Dispatch("g/0", 3, "i0", 10, 20, 1)


class Stage:
    def __init__(self) -> None:
        self.said: list[Any] = []
        self.broken: list[Exception] = []
        self.link = RemoteLink(self.said.append, Shared({}), self.broken.append)


def test_tool_begins_only_for_a_current_turn() -> None:
    stage = Stage()
    begun: list[int] = []
    stage.link.when_acting(DISPATCH, lambda: begun.append(3))
    stage.link.call_tool(CallTool("g/0", 2))
    stage.link.when_acting(DISPATCH, lambda: begun.append(3))
    stage.link.call_tool(CallTool("g/0", 3))
    stage.link.call_tool(CallTool("g/0", 3))
    stage.link.when_acting(DISPATCH, lambda: begun.append(4))
    stage.link.forget("g/0")
    stage.link.call_tool(CallTool("g/0", 3))
    assert begun == [3]


def test_host_judges_answers_and_hears_suspicions() -> None:
    stage = Stage()
    spans = ((9, 1), (1, 1))
    assert stage.link.judge(DISPATCH, Outcome(2, "abort", spans, None), stopped=False) is None
    stage.link.suspect("i0", "pause")
    assert stage.said == [InstanceSuspected("i0", "pause")]


async def test_a_failure_ends_the_front_once() -> None:
    stage = Stage()
    first = InstanceError("one")
    stage.link.fail(first)
    stage.link.fail(InstanceError("two"))
    assert stage.broken == [first]
    assert stage.link.broken is first


def test_deferred_calls_may_defer_calls() -> None:
    stage = Stage()
    done: list[int] = []

    def again() -> None:
        stage.link.defer(done.append, 2)
        raise RuntimeError("its own")

    stage.link.defer(again)
    assert done == []
    stage.link.settle()
    assert done == [2]
