"""Answers checked before they are used, and what becomes of contradictory ones."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import RequestSubmitted, RequestWithdrawn, WeightsPublished
from rollout_sched.live.instances.versions import AROUND_US, FleetVersions
from rollout_sched.live.ports import AnswerUntrue, InstanceError, Outcome, WeightsUnknown
from rollout_sched.live.requests.answers import AnswerChecks, Verdict
from rollout_sched.live.settings import Settings
from tests import virtual_net
from tests.core.told import LIMIT, PROMPT
from tests.live.instances.test_versions import Pump
from tests.live.scripted import Scripted

KNOWS = frozenset({"weight_info"})


class Source:
    """The instance of attempt 1, which was sent there under version 4."""

    def __init__(self, says: int | None, *, tells: bool = True) -> None:
        self.client = Scripted("i0")
        self.client.weights = says
        self.suspicions = 0
        capabilities = KNOWS if tells else frozenset()
        self.description = msgspec.structs.replace(
            self.client.description, capabilities=capabilities
        )

    def suspect(self, of: str) -> None:
        self.suspicions += 1


class Stage:
    def __init__(self, **settings: Any) -> None:
        self.pump = Pump(version=4)
        view = self.pump.scheduler.scheduler.view
        self.versions = FleetVersions(self.pump, view)
        self.source = Source(4)
        supervisors = {"i0": self.source}
        self.checks = AnswerChecks(self.versions, view, Settings(**settings), supervisors)
        self.pump.tell(RequestSubmitted("d", "", PROMPT, LIMIT))

    def judge(
        self, finish: Any, tokens: int = 3, spans: Any = (), *, stopped: bool = False
    ) -> Verdict:
        dispatch = Dispatch("d", 1, "i0", PROMPT, LIMIT, 4)
        return self.checks.judge(dispatch, Outcome(tokens, finish, spans, None), stopped=stopped)

    @property
    def version(self) -> int | None:
        return self.versions.version_of("i0").version


@pytest.mark.parametrize(
    ("spans", "kind"),
    [
        ((), ""),
        (((4, 9),), ""),
        (((5, 9),), "newer"),
        (((4, 3), (5, 6)), "newer"),
        (((3, 9),), "older"),
        (((3, 4), (4, 5)), "older"),
        (((5, 4), (4, 5)), "disordered"),
        (((4, 4), (4, 5)), "disordered"),
    ],
)
def test_kinds(spans: tuple[tuple[int, int], ...], kind: str) -> None:
    assert Stage().checks.kind(1, spans) == kind


def test_unwanted_answer_contradicts_nothing() -> None:
    stage = Stage()
    stage.pump.tell(RequestWithdrawn("d"))
    assert stage.checks.kind(1, ((9, 9),)) == ""
    assert stage.checks.kind(7, ((9, 9),)) == ""


class TestNewer:
    async def test_confirmed_version_is_adopted(self) -> None:
        stage, source = Stage(), Source(6)
        await stage.checks.settle(1, ((4, 3), (5, 6)), source)
        assert stage.version == 6
        assert stage.versions.version_of("i0").driven_by is AROUND_US
        assert stage.checks.kind(1, ((4, 3), (5, 6))) == ""
        assert source.suspicions == 1

    async def test_instance_that_cannot_be_asked_is_believed(self) -> None:
        stage, source = Stage(), Source(None, tells=False)
        await stage.checks.settle(1, ((5, 9),), source)
        assert stage.version == 5
        assert source.client.questions == []

    @pytest.mark.parametrize("policy", ["server", "refuse"])
    async def test_instance_contradicting_itself_is_not_believed(self, policy: str) -> None:
        stage = Stage(on_contradiction=policy)
        with pytest.raises(AnswerUntrue, match=r"names version 5, .* reports version 4"):
            await stage.checks.settle(1, ((5, 9),), Source(4))
        assert stage.version == 4

    async def test_silent_instance_is_not_believed(self) -> None:
        class Silent(Scripted):
            async def weight_version(self) -> int | None:
                raise InstanceError("no answer")

        stage, source = Stage(), Source(5)
        source.client = Silent("i0")
        with pytest.raises(AnswerUntrue, match="no answer"):
            await stage.checks.settle(1, ((5, 9),), source)
        assert stage.version == 4

    async def test_contradictory_answer_is_retried_by_policy(self) -> None:
        stage = Stage(on_contradiction="refuse")
        with pytest.raises(WeightsUnknown, match="version 5, which is not what was loaded"):
            await stage.checks.settle(1, ((5, 9),), Source(5))
        assert stage.version == 4

    async def test_nothing_is_believed_during_a_load(self) -> None:
        stage = Stage()
        stage.pump.tell(WeightsPublished(5))
        stage.pump.scheduler.instance("i0").status = stage.pump.scheduler.instance(
            "i0"
        ).status.UPDATING
        with pytest.raises(WeightsUnknown, match="while we load"):
            await stage.checks.settle(1, ((6, 9),), Source(6))


class TestOlder:
    async def test_the_server_is_believed_and_looked_at(self) -> None:
        stage, source = Stage(), Source(3)
        await stage.checks.settle(1, ((3, 9),), source)
        assert source.suspicions == 1
        assert stage.version == 4, "what it has is for the look to find"

    async def test_server_contradicting_itself_is_not_believed(self) -> None:
        with pytest.raises(AnswerUntrue, match=r"names version 3, .* reports version 4"):
            await Stage().checks.settle(1, ((3, 9),), Source(4))

    async def test_contradictory_answer_is_retried_by_policy(self) -> None:
        stage = Stage(on_contradiction="refuse")
        with pytest.raises(WeightsUnknown):
            await stage.checks.settle(1, ((3, 9),), Source(3))


async def test_versions_that_do_not_grow_are_no_answer() -> None:
    source = Source(4)
    with pytest.raises(AnswerUntrue, match="do not grow"):
        await Stage().checks.settle(1, ((5, 4), (4, 5)), source)
    assert source.client.questions == []


def test_an_incident_is_said_once_and_every_answer_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        stage = Stage()
        for _ in range(5):
            with pytest.raises(AnswerUntrue):
                await stage.checks.settle(1, ((5, 9),), Source(4))
        with pytest.raises(AnswerUntrue):
            await stage.checks.settle(1, ((5, 4), (4, 5)), Source(4))
        assert stage.versions.contradictions == {"newer": 5, "disordered": 1}

    with caplog.at_level(logging.WARNING):
        virtual_net.run(scene())
    assert len([said for said in caplog.messages if "answers with versions" in said]) == 2


@pytest.mark.parametrize("finish", ["stop", "length", "turn"])
def test_natural_end_is_believed(finish: str) -> None:
    stage = Stage()
    assert stage.judge(finish, spans=((4, 3),)) is None
    assert stage.source.suspicions == 0


def test_unasked_abort_has_its_instance_checked() -> None:
    stage = Stage()
    assert stage.judge("abort") is None
    assert stage.source.suspicions == 1
    assert isinstance(stage.judge("abort", tokens=0), InstanceError)


def test_requested_stop_raises_no_suspicion() -> None:
    stage = Stage()
    assert stage.judge("abort", tokens=0, stopped=True) is None
    stage.pump.tell(RequestWithdrawn("d"))
    assert stage.judge("abort", tokens=0) is None
    assert stage.source.suspicions == 0


async def test_contradictory_answer_is_settled_by_asking() -> None:
    settle = Stage().judge("stop", spans=((9, 1), (4, 2)))
    assert callable(settle)
    with pytest.raises(AnswerUntrue):
        await settle()
