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
from rollout_sched.live.instances.versions import (
    AROUND_US,
    THROUGH_US,
    US,
    FleetVersions,
)
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

    def test_adopting_ends_with_a_published_version(self) -> None:
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
