"""Who brings the weights, which version it is, and whose gate is closed."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.events import (
    Event,
    GateClosed,
    GateOpened,
    InstanceJoined,
    InstanceLost,
    RequestSubmitted,
    RequestWithdrawn,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.live.instances.versions import (
    AROUND_US,
    THROUGH_US,
    US,
    Contradictions,
    FleetVersions,
)
from rollout_sched.live.ports import AnswerUntrue, InstanceError, WeightsUnknown
from rollout_sched.live.settings import Settings
from tests import virtual_net
from tests.core.told import FULLY_ASYNC, LIMIT, PROMPT, Told
from tests.live.scripted import Scripted


class Pump:
    """Events to a scheduler, and those that were told."""

    def __init__(self, instances: int = 1, version: int = 0) -> None:
        self.scheduler = Told(instances=instances, version=version, **FULLY_ASYNC)
        self.told: list[Event] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)
        self.scheduler(event)


def versions(instances: int = 1, *, adopts: bool = False) -> tuple[FleetVersions, Pump]:
    pump = Pump(instances)
    return FleetVersions(pump, pump.scheduler.scheduler.view, adopts=adopts), pump


class TestVersions:
    def test_trainer_brings_a_version_to_each_instance(self) -> None:
        book, pump = versions(2)
        assert book.moved("i0", 3, AROUND_US)
        assert pump.told == [WeightsPublished(3, loads=False), WeightsUpdated("i0", 3)]
        assert (book.version_of("i0").version, book.version_of("i1").version) == (3, 0)
        assert (book.version_of("i0").driven_by, book.version_of("i1").driven_by) == (AROUND_US, US)
        assert book.moved("i1", 3, THROUGH_US)
        assert pump.told[2:] == [WeightsUpdated("i1", 3)]

    def test_known_version_is_not_reported(self) -> None:
        book, pump = versions()
        assert not book.moved("i0", 0, AROUND_US)
        assert pump.told == []
        assert book.version_of("i0").driven_by is US

    def test_trainer_version_of_an_absent_instance_is_reported(self) -> None:
        book, pump = versions()
        assert not book.moved("away", 2, THROUGH_US)
        assert pump.told == [WeightsPublished(2, loads=False)]
        assert book.version_of("away").version is None

    def test_version_being_loaded_is_not_reported(self) -> None:
        book, pump = versions()
        pump.tell(WeightsPublished(1))  # nothing runs there, so it is ordered at once
        assert not book.moved("i0", 1, AROUND_US)
        assert pump.told == [WeightsPublished(1)]

    def test_newer_version_is_published_when_the_trainer_drives(self) -> None:
        book, pump = versions()
        assert not book.follows
        assert not book.may_publish(0)
        book.moved("i0", 1, AROUND_US)
        assert book.follows
        assert book.may_publish(1), "it may say how to load what it has loaded"
        pump.tell(WeightsPublished(1))
        book.published()
        assert not book.follows
        assert not book.may_publish(1)
        assert book.version_of("i0").driven_by is US

    def test_adopting_ends_with_what_the_trainer_publishes(self) -> None:
        book, _ = versions(adopts=True)
        assert book.follows
        book.published()
        assert not book.follows


class TestGates:
    def test_gate_is_closed_until_every_reason_ends(self) -> None:
        book, pump = versions()
        book.close_gate("i0", "a")
        book.close_gate("i0", "b")
        book.close_gate("i0", "b")
        assert book.version_of("i0").gate == "a, and b"
        book.open_gate("i0", "a")
        book.open_gate("i0", "never closed for this")
        assert pump.told == [GateClosed("i0")]
        book.open_gate("i0", "b")
        assert pump.told == [GateClosed("i0"), GateOpened("i0")]
        assert book.gate("i0") == ""

    def test_gate_of_an_absent_instance_is_not_reported(self) -> None:
        book, pump = versions()
        pump.tell(InstanceLost("i0"))
        book.close_gate("i0", "a")
        book.open_gate("i0", "a")
        book.close_gate("i0", "b")
        assert pump.told == [InstanceLost("i0")]
        assert book.gate("i0") == "b"
        book.forget("i0")
        assert book.gate("i0") == ""

    def test_gate_closed_while_away_opens_after_joining(self) -> None:
        book, pump = versions()
        book.close_gate("i1", "a")
        pump.tell(InstanceJoined("i1", 8, 1000))
        book.open_gate("i1", "a")
        assert pump.told[-1] == GateOpened("i1")


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
    assert Stage().contradictions.kind(1, spans) == kind


def test_unwanted_answer_contradicts_nothing() -> None:
    stage = Stage()
    stage.pump.tell(RequestWithdrawn("d"))
    assert stage.contradictions.kind(1, ((9, 9),)) == ""
    assert stage.contradictions.kind(7, ((9, 9),)) == ""


class TestNewer:
    async def test_confirmed_version_is_adopted(self) -> None:
        stage, source = Stage(), Source(6)
        await stage.contradictions.settle(1, ((4, 3), (5, 6)), source)
        assert stage.version == 6
        assert stage.versions.version_of("i0").driven_by is AROUND_US
        assert stage.contradictions.kind(1, ((4, 3), (5, 6))) == ""
        assert source.suspicions == 1

    async def test_instance_that_cannot_be_asked_is_believed(self) -> None:
        stage, source = Stage(), Source(None, tells=False)
        await stage.contradictions.settle(1, ((5, 9),), source)
        assert stage.version == 5
        assert source.client.questions == []

    @pytest.mark.parametrize("policy", ["server", "refuse"])
    async def test_instance_contradicting_itself_is_not_believed(self, policy: str) -> None:
        stage = Stage(on_contradiction=policy)
        with pytest.raises(AnswerUntrue, match=r"names version 5, .* reports version 4"):
            await stage.contradictions.settle(1, ((5, 9),), Source(4))
        assert stage.version == 4

    async def test_silent_instance_is_not_believed(self) -> None:
        class Silent(Scripted):
            async def weight_version(self) -> int | None:
                raise InstanceError("no answer")

        stage, source = Stage(), Source(5)
        source.client = Silent("i0")
        with pytest.raises(AnswerUntrue, match="no answer"):
            await stage.contradictions.settle(1, ((5, 9),), source)
        assert stage.version == 4

    async def test_contradictory_answer_is_retried_by_policy(self) -> None:
        stage = Stage(on_contradiction="refuse")
        with pytest.raises(WeightsUnknown, match="version 5, which is not what was loaded"):
            await stage.contradictions.settle(1, ((5, 9),), Source(5))
        assert stage.version == 4

    async def test_nothing_is_believed_during_a_load(self) -> None:
        stage = Stage()
        stage.pump.tell(WeightsPublished(5))
        stage.pump.scheduler.instance("i0").status = stage.pump.scheduler.instance(
            "i0"
        ).status.UPDATING
        with pytest.raises(WeightsUnknown, match="while we load"):
            await stage.contradictions.settle(1, ((6, 9),), Source(6))


class TestOlder:
    async def test_the_server_is_believed_and_looked_at(self) -> None:
        stage, source = Stage(), Source(3)
        await stage.contradictions.settle(1, ((3, 9),), source)
        assert source.suspicions == 1
        assert stage.version == 4, "what it has is for the look to find"

    async def test_server_contradicting_itself_is_not_believed(self) -> None:
        with pytest.raises(AnswerUntrue, match=r"names version 3, .* reports version 4"):
            await Stage().contradictions.settle(1, ((3, 9),), Source(4))

    async def test_contradictory_answer_is_retried_by_policy(self) -> None:
        stage = Stage(on_contradiction="refuse")
        with pytest.raises(WeightsUnknown):
            await stage.contradictions.settle(1, ((3, 9),), Source(3))


async def test_versions_that_do_not_grow_are_no_answer() -> None:
    source = Source(4)
    with pytest.raises(AnswerUntrue, match="do not grow"):
        await Stage().contradictions.settle(1, ((5, 4), (4, 5)), source)
    assert source.client.questions == []


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
        virtual_net.run(scene())
    assert len([said for said in caplog.messages if "answers with versions" in said]) == 2
