"""The view: it shows what is so, at the moment it is asked."""

from __future__ import annotations

from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestFinished,
    RequestSubmitted,
    RequestWithdrawn,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.core.model.model import GroupState
from tests.core.told import BIG, LIMIT, PROMPT, Told


def test_requests_are_counted_where_they_are() -> None:
    told = Told(slots=1)
    view = told.scheduler.view
    told(RequestSubmitted("d1", "", PROMPT, LIMIT), RequestSubmitted("d2", "", PROMPT, LIMIT))
    assert (view.in_flight, view.waiting, view.parked) == (1, 1, 0)
    told(RequestFinished("d1", 1, 3), RequestFinished("d2", 2, 3))
    assert (view.in_flight, view.waiting, view.parked) == (0, 0, 0)


def test_groups_by_state() -> None:
    told = Told(instances=0)
    told.submit("a", "b")
    assert told.scheduler.view.groups(GroupState.FRESH) == 2
    assert told.scheduler.view.groups(GroupState.ACTIVE) == 0


def test_instances_come_and_go() -> None:
    told = Told(instances=2)
    view = told.scheduler.view
    assert [instance.id for instance in view.instances] == ["i0", "i1"]
    told(InstanceLost("i0"))
    assert view.instance("i0") is None
    assert view.instance("i1") is told.instance("i1")


def test_somebody_can_be_asked_even_where_all_are_full() -> None:
    told = Told(instances=0)
    view = told.scheduler.view
    assert view.least_loaded() is None
    told(InstanceJoined("i0", 1, BIG), RequestSubmitted("d", "", PROMPT, LIMIT))
    assert view.least_loaded() is told.instance("i0")


def test_an_attempt_stops_when_nobody_wants_it() -> None:
    told = Told()
    view = told.scheduler.view
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    assert not view.is_stopping(1)
    told(RequestWithdrawn("d"))
    assert view.is_stopping(1)
    assert view.is_stopping(99)


def test_sessions_are_known_by_where_they_were() -> None:
    told = Told()
    told(RequestSubmitted("d", "", PROMPT, LIMIT, "talk"))
    assert told.scheduler.view.knows_session("talk")
    assert not told.scheduler.view.knows_session("another")


def test_the_versions_that_an_attempt_may_have_used() -> None:
    told = Told()
    view = told.scheduler.view
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    assert view.versions_of(1) == (0, 0)
    told(WeightsPublished(2, loads=False), WeightsUpdated("i0", 2))
    assert view.versions_of(1) == (0, 2)
    told(RequestWithdrawn("d"))
    assert view.versions_of(1) is None, "nobody wants it any more"
    assert view.versions_of(99) is None


def test_view_says_who_loads_the_newest_version() -> None:
    told = Told()
    assert told.scheduler.view.loads_newest
    told(WeightsPublished(1, loads=False))
    assert not told.scheduler.view.loads_newest
    told(WeightsPublished(2))
    assert told.scheduler.view.loads_newest


def test_a_run_has_begun_with_its_first_group() -> None:
    told = Told()
    view = told.scheduler.view
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    assert not view.has_begun
    told(GroupSubmitted("g", 1, PROMPT, LIMIT))
    assert view.has_begun
    told(BatchRequested(), RequestFinished("g/0", 2, 5))
    assert not len(told.scheduler.state.groups), "it was delivered"
    assert view.has_begun
