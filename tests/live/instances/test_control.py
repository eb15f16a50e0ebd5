"""Control orders: one after the other, each in its time, and none for an instance that is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_sched.core.model.events import InstancePaused, InstanceReturned, WeightsUpdated
from rollout_sched.live.instances.control import ControlOrder, InstanceControl
from rollout_sched.live.instances.instance import FleetInstance
from rollout_sched.live.instances.membership import JOIN
from rollout_sched.live.instances.pause import HOLD, PausedBy
from rollout_sched.live.ports import InstanceError
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted

SETTINGS = Settings(control_timeout_s=5.0, update_timeout_s=50.0, abort_timeout_s=10.0)


class Controlled:
    """Notes what it is asked and when, and takes a second for each."""

    name = "i0"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None
        self.hangs = False

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self._note("pause", mode, clear_cache)

    async def resume(self) -> None:
        await self._note("resume")

    async def set_version(self, version: int) -> None:
        await self._note("version", version)

    async def load(self, client: Any, version: int) -> None:
        await self._note("load", version)

    async def _note(self, *call: Any) -> None:
        self.calls.append(call if len(call) > 1 else call[0])
        await asyncio.sleep(1e6 if self.hangs else 1.0)
        if self.error is not None:
            raise self.error


class Stage:
    """Orders at work, for a fleet of one instance, and what came of them."""

    settings = SETTINGS

    def __init__(self) -> None:
        self.client: Any = Controlled()
        self.instance = FleetInstance(self.client, self)
        self.instance.health.forget_progress = self.note_resumed
        self.pause = self.instance.pause
        self.attempts = self
        self.told: list[Any] = []
        self.failed: list[tuple[int | None, str]] = []
        self.resumed = 0
        self.broken: Exception | None = None
        self.orders = InstanceControl(self.instance, self.note_failure)

    async def __aenter__(self) -> Stage:
        self.working = asyncio.create_task(self.orders.carry_out())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.working.cancel()
        await asyncio.wait_for(asyncio.gather(self.working, return_exceptions=True), 5)

    def note_failure(self, order: ControlOrder, why: str) -> None:
        self.failed.append((order.version, f"{order.what}: {why}"))

    def note_resumed(self) -> None:
        self.resumed += 1

    def tell(self, event: Any) -> None:
        self.told.append((asyncio.get_running_loop().time(), event))

    def resumed(self, instance: str) -> None: ...

    async def pausing(self, instance: str) -> None:
        await asyncio.sleep(0)
        if self.broken is not None:
            raise self.broken

    async def answered(self, instance: str) -> None:
        await asyncio.sleep(1.0)
        self.client.calls.append("answered")

    def on(self, instance: str) -> list[Any]:
        return []

    def stop(self, attempt: int, reason: str) -> None: ...

    def reject_streamed(self, attempt: int) -> None: ...


async def test_an_update_from_pause_to_resume() -> None:
    async with Stage() as stage:
        stage.orders.pause("abort", True)
        stage.orders.update(7, stage.client.load)
        stage.orders.resume()
        await asyncio.sleep(1.5)
        assert stage.pause.by is PausedBy.US
        await asyncio.sleep(10.0)
        assert stage.client.calls == [
            ("pause", "abort", True),
            "answered",
            ("load", 7),
            ("version", 7),
            "resume",
        ]
        assert stage.told == [(2.0, InstancePaused("i0")), (4.0, WeightsUpdated("i0", 7))]
        assert (stage.resumed, stage.failed) == (1, [])
        assert stage.pause.by is PausedBy.NOBODY


async def test_unrecorded_pause_is_not_sent() -> None:
    """The pause was sent, and the disk failed before that was written: the next process took it
    for somebody else's."""
    async with Stage() as stage:
        stage.broken = InstanceError("the disk is gone")
        stage.orders.pause("keep", False)
        stage.orders.lend(lambda name: None)
        await asyncio.sleep(5.0)
        assert stage.client.calls == []
        assert stage.pause.by is PausedBy.NOBODY
        why = "the disk is gone"
        assert stage.failed == [
            (None, f"pause: {why}"),
            (None, f"pause for the trainer: {why}"),
        ]


async def test_instance_is_lent_and_taken_back() -> None:
    async with Stage() as stage:
        lent: list[str] = []
        stage.orders.lend(lent.append)
        await asyncio.sleep(1.5)
        assert (lent, stage.told) == (["i0"], [])
        assert stage.pause.by is PausedBy.US
        stage.orders.take_back()
        await asyncio.sleep(10.0)
        assert stage.client.calls == [("pause", "keep", True), "resume"]
        assert stage.told == [(2.5, InstanceReturned("i0"))]
        assert (stage.resumed, stage.pause.by) == (1, PausedBy.NOBODY)


async def test_returned_instance_stays_paused_while_held() -> None:
    async with Stage() as stage:
        stage.orders.lend(lambda name: None)
        stage.pause.move(HOLD)
        stage.orders.take_back()
        await asyncio.sleep(10.0)
        assert stage.client.calls == [("pause", "keep", True)]
        assert [event for _, event in stage.told] == [InstanceReturned("i0")]


async def test_instance_that_fails_to_pause_is_not_lent() -> None:
    async with Stage() as stage:
        lent: list[str] = []
        stage.client.error = InstanceError("no")
        stage.orders.lend(lent.append)
        await asyncio.sleep(10.0)
        assert (lent, stage.failed) == ([], [(None, "pause for the trainer: no")])


async def test_held_instance_is_not_resumed() -> None:
    async with Stage() as stage:
        stage.orders.pause("keep", False)
        stage.pause.move(HOLD)
        stage.orders.resume()
        await asyncio.sleep(10.0)
        assert stage.client.calls == [("pause", "keep", False)]
        assert stage.pause.by is PausedBy.ADMINISTRATOR


async def test_other_control_runs_between_orders() -> None:
    async with Stage() as stage:
        stage.orders.pause("abort", False)
        stage.orders.resume()
        await asyncio.sleep(0.5)
        async with stage.instance.control_lock:
            stage.client.calls.append("an administrator")
            await asyncio.sleep(5.0)
        await asyncio.sleep(5.0)
        assert stage.client.calls == [
            ("pause", "abort", False),
            "answered",
            "an administrator",
            "resume",
        ]


@pytest.mark.parametrize(
    ("order", "within_s", "version", "what"),
    [
        ("pause", 25.0, None, "pause"),
        ("resume", 5.0, None, "resume"),
        ("update", 50.0, 7, "update to 7"),
    ],
)
@pytest.mark.parametrize("hangs", [False, True])
async def test_an_order_fails_by_an_error_or_by_taking_too_long(
    order: str, within_s: float, version: int | None, what: str, hangs: bool
) -> None:
    async with Stage() as stage:
        stage.client.error, stage.client.hangs = InstanceError("500"), hangs
        arguments = {"pause": ("keep", False), "update": (7, stage.client.load)}
        getattr(stage.orders, order)(*arguments.get(order, ()))
        await asyncio.sleep((within_s if hangs else 1.0) - 0.1)
        assert stage.failed == []
        await asyncio.sleep(0.2)
        why = f"no answer within {within_s:g} s" if hangs else "500"
        assert stage.failed == [(version, f"{what}: {why}")]
        assert stage.told == []


async def test_a_pause_that_failed_may_have_been_one() -> None:
    """It is ours to end when the instance joins again."""
    async with Stage() as stage:
        stage.client.error = InstanceError("connection reset")
        stage.orders.pause("keep", False)
        await asyncio.sleep(2.0)
        assert stage.pause.by is PausedBy.US


async def test_weights_without_a_loader_fail() -> None:
    async with Stage() as stage:
        stage.orders.update(7, None)
        await asyncio.sleep(0.1)
        assert stage.failed == [(7, "update to 7: nobody said how to load version 7")]


async def test_cancelled_orders_neither_run_nor_fail() -> None:
    async with Stage() as stage:
        stage.orders.update(7, stage.client.load)
        stage.orders.resume()
        await asyncio.sleep(0.5)
        stage.orders.call_off()
        stage.orders.pause("keep", False)  # for the next that joins under this name
        await asyncio.sleep(10.0)
        assert stage.client.calls == [("load", 7), ("pause", "keep", False)]
        assert stage.failed == []
        assert [event for _, event in stage.told] == [InstancePaused("i0")]


async def test_order_waiting_for_the_lock_is_cancelled() -> None:
    """Else it would pause the instance when it has joined again, and nobody would resume it."""
    async with Stage() as stage:
        async with stage.instance.control_lock:
            stage.orders.pause("keep", False)
            await asyncio.sleep(0.5)
            stage.orders.call_off()
        await asyncio.sleep(10.0)
        assert stage.client.calls == []
        assert stage.pause.by is PausedBy.NOBODY


async def test_loader_error_on_cancellation_delays_nothing() -> None:
    async def stubborn(client: Any, version: int) -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            raise InstanceError("interrupted") from None

    async with Stage() as stage:
        stage.orders.update(7, stubborn)
        await asyncio.sleep(0.5)
        stage.orders.call_off()
        await asyncio.sleep(0.5)
        assert stage.failed == [(7, "update to 7: interrupted")]
        stage.orders.update(8, stubborn)
        await asyncio.sleep(0.5)
    assert len(stage.failed) == 1
    assert stage.working.done()


class Paused:
    """One instance's, which has joined if it is told so."""

    def __init__(self, *, joined: bool) -> None:
        self.client = Scripted()
        fleet: Any = SimpleNamespace(settings=Settings(), resumed=lambda name: None)
        self.instance = FleetInstance(self.client, fleet)
        self.instance.health.forget_progress = self._go_on
        self.pause = self.instance.pause
        self.resumed = 0
        if joined:
            self.instance.membership.move(JOIN)
        self.control = InstanceControl(self.instance, lambda order, why: None)

    def _go_on(self) -> None:
        self.resumed += 1


async def test_hold_lasts_until_its_release() -> None:
    one = Paused(joined=True)
    await one.control.hold("abort", clear_cache=True)
    assert one.control.held
    assert one.resumed == 0
    await one.control.release()
    assert not one.control.held
    assert one.client.calls == [("pause", "abort", True), "resume"]
    assert one.resumed == 1, "from now on its gauges are to move"


async def test_hold_released_while_away_ends_on_joining() -> None:
    one = Paused(joined=False)
    one.control.note_held()
    await one.control.release()
    assert one.client.calls == [], "nobody is there who could be told"
    assert not one.control.held
    assert one.pause.ours, "whoever lets it join resumes it"


async def test_a_pause_that_failed_holds_nothing() -> None:
    one = Paused(joined=True)

    async def pause(mode: str, clear_cache: bool) -> None:
        raise InstanceError("500")

    one.client.pause = pause  # type: ignore[method-assign]
    with pytest.raises(InstanceError, match="500"):
        await one.control.hold("keep", clear_cache=False)
    assert not one.control.held
    assert one.pause.by is PausedBy.NOBODY


async def test_hold_waits_for_a_running_update() -> None:
    """What an update does under the lock is done before an administrator's pause is passed on."""
    one = Paused(joined=True)
    async with one.instance.control_lock:
        holding = asyncio.create_task(one.control.hold("keep", clear_cache=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert one.client.calls == []
    await holding
    assert one.client.calls == [("pause", "keep", False)]
