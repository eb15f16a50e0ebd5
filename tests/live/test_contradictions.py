"""What an answer says of its versions, against what is known of its instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.events import RequestSubmitted, RequestWithdrawn, WeightsPublished
from rollout_sched.live.instances.versions import AROUND_US, Contradictions, FleetVersions
from rollout_sched.live.ports import AnswerUntrue, InstanceError, WeightsUnknown
from rollout_sched.live.settings import Settings
from tests.core.told import LIMIT, PROMPT
from tests.live.scripted import Scripted
from tests.live.test_fleet_versions import Pump

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

    def suspect(self) -> None:
        self.suspicions += 1


class Stage:
    def __init__(self, **settings: Any) -> None:
        self.pump = Pump(version=4)
        view = self.pump.scheduler.scheduler.view
        self.versions = FleetVersions(self.pump, view)
        self.contradictions = Contradictions(self.versions, view, Settings(**settings))
        self.pump.tell(RequestSubmitted("d", "", PROMPT, LIMIT))

    @property
    def version(self) -> int | None:
        return self.versions.of("i0").version


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


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
    assert Stage().contradictions.kind(1, spans) == kind


def test_an_answer_that_nobody_wants_contradicts_nothing() -> None:
    stage = Stage()
    stage.pump.tell(RequestWithdrawn("d"))
    assert stage.contradictions.kind(1, ((9, 9),)) == ""
    assert stage.contradictions.kind(7, ((9, 9),)) == ""


class TestNewer:
    def test_what_it_stands_by_is_what_has_happened(self) -> None:
        async def scene() -> None:
            stage, source = Stage(), Source(6)
            await stage.contradictions.settle(1, ((4, 3), (5, 6)), source)
            assert stage.version == 6
            assert stage.versions.of("i0").driven_by is AROUND_US
            assert stage.contradictions.kind(1, ((4, 3), (5, 6))) == ""
            assert source.suspicions == 1

        play(scene)

    def test_one_that_cannot_be_asked_is_believed(self) -> None:
        async def scene() -> None:
            stage, source = Stage(), Source(None, tells=False)
            await stage.contradictions.settle(1, ((5, 9),), source)
            assert stage.version == 5
            assert source.client.questions == []

        play(scene)

    @pytest.mark.parametrize("policy", ["server", "refuse"])
    def test_one_that_contradicts_itself_is_not(self, policy: str) -> None:
        async def scene() -> None:
            stage = Stage(on_contradiction=policy)
            with pytest.raises(AnswerUntrue, match=r"names version 5, .* reports version 4"):
                await stage.contradictions.settle(1, ((5, 9),), Source(4))
            assert stage.version == 4

        play(scene)

    def test_nor_one_that_does_not_answer(self) -> None:
        class Silent(Scripted):
            async def weight_version(self) -> int | None:
                raise InstanceError("no answer")

        async def scene() -> None:
            stage, source = Stage(), Source(5)
            source.client = Silent("i0")
            with pytest.raises(AnswerUntrue, match="no answer"):
                await stage.contradictions.settle(1, ((5, 9),), source)
            assert stage.version == 4

        play(scene)

    def test_by_policy_it_is_made_again(self) -> None:
        async def scene() -> None:
            stage = Stage(on_contradiction="refuse")
            with pytest.raises(WeightsUnknown, match="version 5, which is not what was loaded"):
                await stage.contradictions.settle(1, ((5, 9),), Source(5))
            assert stage.version == 4

        play(scene)

    def test_while_we_load_there_nothing_is_believed(self) -> None:
        async def scene() -> None:
            stage = Stage()
            stage.pump.tell(WeightsPublished(5))
            stage.pump.scheduler.instance("i0").status = stage.pump.scheduler.instance(
                "i0"
            ).status.UPDATING
            with pytest.raises(WeightsUnknown, match="while we load"):
                await stage.contradictions.settle(1, ((6, 9),), Source(6))

        play(scene)


class TestOlder:
    def test_the_server_is_believed_and_looked_at(self) -> None:
        async def scene() -> None:
            stage, source = Stage(), Source(3)
            await stage.contradictions.settle(1, ((3, 9),), source)
            assert source.suspicions == 1
            assert stage.version == 4, "what it has is for the look to find"

        play(scene)

    def test_unless_it_contradicts_itself(self) -> None:
        async def scene() -> None:
            with pytest.raises(AnswerUntrue, match=r"names version 3, .* reports version 4"):
                await Stage().contradictions.settle(1, ((3, 9),), Source(4))

        play(scene)

    def test_by_policy_it_is_made_again(self) -> None:
        async def scene() -> None:
            stage = Stage(on_contradiction="refuse")
            with pytest.raises(WeightsUnknown):
                await stage.contradictions.settle(1, ((3, 9),), Source(3))

        play(scene)


def test_versions_that_do_not_grow_are_no_answer() -> None:
    async def scene() -> None:
        source = Source(4)
        with pytest.raises(AnswerUntrue, match="do not grow"):
            await Stage().contradictions.settle(1, ((5, 4), (4, 5)), source)
        assert source.client.questions == []

    play(scene)


def test_an_incident_is_said_once_and_every_answer_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        stage = Stage()
        for _ in range(5):
            with pytest.raises(AnswerUntrue):
                await stage.contradictions.settle(1, ((5, 9),), Source(4))
        with pytest.raises(AnswerUntrue):
            await stage.contradictions.settle(1, ((5, 4), (4, 5)), Source(4))
        assert stage.versions.contradictions == {"newer": 5, "disordered": 1}

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert len([said for said in caplog.messages if "answers with versions" in said]) == 2
