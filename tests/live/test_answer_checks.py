"""What an answer is worth: what ends unasked, or contradicts what is known, is looked into."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import RequestSubmitted, RequestWithdrawn
from rollout_sched.live.instances.versions import Contradictions, FleetVersions
from rollout_sched.live.ports import AnswerUntrue, InstanceError, Outcome
from rollout_sched.live.requests.link import AnswerChecks, Verdict
from rollout_sched.live.settings import Settings
from tests.core.told import LIMIT, PROMPT
from tests.live.test_contradictions import Source
from tests.live.test_fleet_versions import Pump


class Stage:
    """One attempt on i0, under version 4."""

    def __init__(self) -> None:
        self.pump = Pump(version=4)
        view = self.pump.scheduler.scheduler.view
        contradictions = Contradictions(FleetVersions(self.pump, view), view, Settings())
        self.source = Source(4)
        self.checks = AnswerChecks(view, {"i0": self.source}, contradictions)
        self.pump.tell(RequestSubmitted("d", "", PROMPT, LIMIT))

    def judge(
        self, finish: Any, tokens: int = 3, spans: Any = (), *, stopped: bool = False
    ) -> Verdict:
        dispatch = Dispatch("d", 1, "i0", PROMPT, LIMIT, 4)
        return self.checks.judge(dispatch, Outcome(tokens, finish, spans, None), stopped=stopped)


@pytest.mark.parametrize("finish", ["stop", "length", "turn"])
def test_what_ends_by_itself_is_believed(finish: str) -> None:
    stage = Stage()
    assert stage.judge(finish, spans=((4, 3),)) is None
    assert stage.source.suspicions == 0


def test_what_ends_unasked_lets_its_instance_be_looked_at() -> None:
    stage = Stage()
    assert stage.judge("abort") is None
    assert stage.source.suspicions == 1
    assert isinstance(stage.judge("abort", tokens=0), InstanceError)


def test_what_we_have_stopped_is_no_surprise() -> None:
    stage = Stage()
    assert stage.judge("abort", tokens=0, stopped=True) is None
    stage.pump.tell(RequestWithdrawn("d"))
    assert stage.judge("abort", tokens=0) is None
    assert stage.source.suspicions == 0


def test_what_contradicts_what_is_known_is_asked_about() -> None:
    settle = Stage().judge("stop", spans=((9, 1), (4, 2)))
    assert callable(settle)

    async def scene() -> None:
        with pytest.raises(AnswerUntrue):
            await settle()

    asyncio.run(scene())
