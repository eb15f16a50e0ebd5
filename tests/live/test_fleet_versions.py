"""Who brings the weights, which version it is, and whose gate is closed."""

from __future__ import annotations

from rollout_sched.core.model.events import (
    Event,
    GateClosed,
    GateOpened,
    InstanceJoined,
    InstanceLost,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.live.instances.versions import AROUND_US, THROUGH_US, US, FleetVersions
from tests.core.told import FULLY_ASYNC, Told


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
    def test_the_trainer_brings_a_version_to_one_after_the_other(self) -> None:
        book, pump = versions(2)
        assert book.moved("i0", 3, AROUND_US)
        assert pump.told == [WeightsPublished(3, loads=False), WeightsUpdated("i0", 3)]
        assert (book.of("i0").version, book.of("i1").version) == (3, 0)
        assert (book.of("i0").driven_by, book.of("i1").driven_by) == (AROUND_US, US)
        assert book.moved("i1", 3, THROUGH_US)
        assert pump.told[2:] == [WeightsUpdated("i1", 3)]

    def test_no_news_is_not_told(self) -> None:
        book, pump = versions()
        assert not book.moved("i0", 0, AROUND_US)
        assert pump.told == []
        assert book.of("i0").driven_by is US

    def test_of_one_that_is_away_the_trainers_version_is_news(self) -> None:
        book, pump = versions()
        assert not book.moved("away", 2, THROUGH_US)
        assert pump.told == [WeightsPublished(2, loads=False)]
        assert book.of("away").version is None

    def test_what_we_load_just_now_is_left_to_that(self) -> None:
        book, pump = versions()
        pump.tell(WeightsPublished(1))  # nothing runs there, so it is ordered at once
        assert not book.moved("i0", 1, AROUND_US)
        assert pump.told == [WeightsPublished(1)]

    def test_a_newer_version_is_the_trainers_where_it_drives(self) -> None:
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
        assert book.of("i0").driven_by is US

    def test_adopting_ends_with_what_the_trainer_publishes(self) -> None:
        book, _ = versions(adopts=True)
        assert book.follows
        book.published()
        assert not book.follows


class TestGates:
    def test_closed_until_every_reason_is_over(self) -> None:
        book, pump = versions()
        book.close_gate("i0", "a")
        book.close_gate("i0", "b")
        book.close_gate("i0", "b")
        assert book.of("i0").gate == "a, and b"
        book.open_gate("i0", "a")
        book.open_gate("i0", "never closed for this")
        assert pump.told == [GateClosed("i0")]
        book.open_gate("i0", "b")
        assert pump.told == [GateClosed("i0"), GateOpened("i0")]
        assert book.gate("i0") == ""

    def test_of_one_that_is_away_nobody_is_told(self) -> None:
        book, pump = versions()
        pump.tell(InstanceLost("i0"))
        book.close_gate("i0", "a")
        book.open_gate("i0", "a")
        book.close_gate("i0", "b")
        assert pump.told == [InstanceLost("i0")]
        assert book.gate("i0") == "b"
        book.forget("i0")
        assert book.gate("i0") == ""

    def test_a_gate_that_was_closed_while_it_was_away_opens_for_who_has_joined(self) -> None:
        book, pump = versions()
        book.close_gate("i1", "a")
        pump.tell(InstanceJoined("i1", 8, 1000))
        book.open_gate("i1", "a")
        assert pump.told[-1] == GateOpened("i1")
