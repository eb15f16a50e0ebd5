"""The event pump: events one after the other, and nothing that looks on can stop it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Dispatch, Wake
from rollout_sched.live.event_pump import EventPump, RunClock
from tests.core.told import make_scheduler

JOINED = ev.InstanceJoined("i0", 4, 10_000)
ASKED = ev.RequestSubmitted("r", "r", 10, 20)


class Pumped:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.done: list[Any] = []
        self.broken: list[Exception] = []
        self.pump = EventPump(make_scheduler(), [self.observe], self.broken.append)
        self.pump.on(Dispatch, self.done.append)

    def observe(self, now: float, event: ev.Event, actions: Any) -> None:
        self.seen.append((event, actions))


async def test_nested_events_are_handled_afterwards() -> None:
    it = Pumped()
    it.pump.on(Dispatch, lambda action: it.pump.tell(ev.RequestWithdrawn("none")))
    it.pump.tell(JOINED)
    it.pump.tell(ASKED)
    assert [event for event, _ in it.seen] == [JOINED, ASKED, ev.RequestWithdrawn("none")]


async def test_deferred_calls_may_submit_at_once() -> None:
    it = Pumped()
    again = ev.RequestSubmitted("again", "r", 10, 20)
    it.pump.on(Dispatch, lambda action: it.pump.defer(ask) if len(it.seen) == 2 else None)

    def ask() -> None:
        it.pump.tell(again)
        assert it.seen[-1][0] == again, "it was not handled before this returned"

    it.pump.tell(JOINED)
    it.pump.tell(ASKED)
    assert it.seen[-1][0] == again


async def test_caller_gets_only_its_own_error() -> None:
    it = Pumped()
    it.pump.on(Dispatch, lambda action: it.pump.tell(ASKED))  # its id is used already
    it.pump.tell(JOINED)
    it.pump.tell(ASKED)
    with pytest.raises(CallerError):
        it.pump.tell(ASKED)
    assert [event for event, _ in it.seen] == [JOINED, ASKED]
    assert it.pump.broken is None


async def test_failing_observer_is_removed_and_failing_watcher_stays() -> None:
    it = Pumped()
    heard: list[Any] = []

    def observe(*told: Any) -> None:
        heard.append("observer")
        raise RuntimeError

    def watch(event: ev.Event) -> None:
        heard.append("watcher")
        raise RuntimeError

    it.pump.observers.append(observe)
    it.pump.watch(watch, ev.InstanceJoined, ev.InstanceLost)
    it.pump.tell(JOINED)
    it.pump.tell(ev.InstanceLost("i0", "gone"))
    assert heard == ["observer", "watcher", "watcher"]
    assert len(it.seen) == 2


async def test_broken_scheduler_gets_no_more_events() -> None:
    it = Pumped()

    def explode(action: Dispatch) -> None:
        raise RuntimeError("it cannot be done")

    it.pump.on(Dispatch, explode)
    it.pump.tell(JOINED)
    it.pump.check()
    it.pump.tell(ASKED)
    assert [str(error) for error in it.broken] == ["it cannot be done"]
    with pytest.raises(RuntimeError, match="it cannot be done"):
        it.pump.check()
    it.pump.tell(ev.InstanceLost("i0", "gone"))
    assert len(it.seen) == 2
    it.pump.fail(RuntimeError("twice"))
    assert len(it.broken) == 1


async def test_it_wakes_the_scheduler_when_that_asked_for_it() -> None:
    it = Pumped()
    it.pump.wake(Wake(it.pump.now + 0.01))
    await asyncio.sleep(0.05)
    assert [event for event, _ in it.seen] == [ev.Woke()]


async def test_before_hooks_run_under_any_handler() -> None:
    it = Pumped()
    it.pump.before(Dispatch, lambda action: it.done.append("before"))
    it.pump.tell(JOINED)
    it.pump.tell(ASKED)
    assert [type(done) for done in it.done] == [str, Dispatch]
    it.done.clear()
    it.pump.on(Dispatch, lambda action: it.done.append("another"))
    it.pump.tell(ev.RequestSubmitted("s", "s", 10, 20))
    assert it.done == ["before", "another"]


async def test_clock_starts_at_construction() -> None:
    await asyncio.sleep(3.0)
    clock, told = RunClock(), list[str]()
    clock.call_at(0.5, told.append, "half")
    await asyncio.sleep(0.25)
    assert (clock.now, told) == (0.25, [])
    await asyncio.sleep(0.5)
    assert told == ["half"]


@pytest.mark.parametrize(("began", "earlier"), [(5.8, 0.43), (18.03, 0.61), (0.0, 7.0)])
async def test_clock_continues_from_an_earlier_run(began: float, earlier: float) -> None:
    """Not from a rounding before it, at which that run could not be restored."""
    await asyncio.sleep(began)
    clock, times = RunClock(), list[float]()
    clock.resume_at(earlier)
    assert clock.now == earlier
    clock.call_at(earlier + 0.13, lambda: times.append(clock.now))
    await asyncio.sleep(0.2)
    assert len(times) == 1
    assert times[0] >= earlier + 0.13, "a scheduler would ask to be woken again, without end"
