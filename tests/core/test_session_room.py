"""Where another session may begin: as many as the admission says, at open instances."""

from __future__ import annotations

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import Instance
from rollout_sched.core.state.fleet import SessionRoom
from tests.core.told import make_request


class OfTwo:
    """Two sessions at once."""

    def begins(self, instance: Instance) -> bool:
        return instance.sessions < 2

    def continues(self, instance: Instance) -> bool:
        return True

    def observe(self, instance: Instance, report: InstanceReported) -> float:
        return report.kv_usage


def test_nobody_bounds_them() -> None:
    room, instance = SessionRoom(None), Instance("i0", 0, 8, 100, 0)
    room.update(instance)
    room.observe(instance, InstanceReported("i0", 0, 0, 0.5))
    assert room.may_begin(make_request(), instance)
    assert (room.taking, instance.takes_new, instance.observed) == (0, False, None)


def test_those_that_take_new_ones_are_counted() -> None:
    room = SessionRoom(OfTwo())
    full, other = (Instance(f"i{n}", n, 8, 100, 0) for n in range(2))
    for number in range(2):
        request = make_request(f"a/{number}")
        full.kept[request.id] = request
    for instance in (full, other, other):
        room.update(instance)
    assert (room.taking, full.takes_new, other.takes_new) == (1, False, True)
    assert not room.may_begin(make_request(), full)
    at_home = make_request()
    at_home.home = other
    assert room.may_begin(at_home, full), "it has begun already"
    room.close(other)
    room.close(other)
    assert room.taking == 0


def test_a_report_is_shown_to_who_bounds_them() -> None:
    room, instance = SessionRoom(OfTwo()), Instance("i0", 0, 8, 100, 0)
    room.observe(instance, InstanceReported("i0", 0, 0, 0.5))
    assert instance.observed == 0.5
