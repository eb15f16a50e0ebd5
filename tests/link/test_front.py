"""A front follows only orders of its scheduler's current epoch, and ends if it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollout_sched.config import load_policy
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import RequestFinished
from rollout_sched.core.model.records import Segment
from rollout_sched.link.front import FrontCalls, NoScheduler
from rollout_sched.link.host import Hub
from rollout_sched.link.protocol import Orders, Reports, encode
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceClient, InstanceGone
from rollout_sched.live.settings import RunOptions, Settings
from tests.link.fixtures import PROMPT, Caller, Stage
from tests.link.wires import Shared
from tests.live.scripted import Scripted, until


async def test_orders_of_an_older_epoch_are_refused() -> None:
    async with Stage(1) as stage:
        caller = stage.ask()
        remote = stage.fronts[0].remote
        late = Dispatch(stage.request, 77, "i0", 3, 9, 0)
        remote.receive(encode(Orders("old", 1, [late])))
        assert remote.refused == 1
        await stage.instance.answer(0, [7])
        await until(lambda: caller.heard)
        assert [order.id for order in stage.instance.orders.values()] == ["run-1"]


async def test_a_front_that_cannot_follow_orders_ends() -> None:
    async with Stage(1) as stage:
        joined = stage.fronts[0]
        stage.ask()
        unknown = Dispatch(stage.request, 77, "nowhere", 3, 9, 0)
        joined.connected.order(unknown)
        joined.connected.order(unknown)
        await until(lambda: joined.broken)
        assert [type(error) for error in joined.broken] == [KeyError]
        try:
            stage.ask()
        except KeyError:
            pass
        else:
            raise AssertionError("it takes requests")


SETTINGS = Settings(poll_s=1000.0, stream_s=0.01, abort_timeout_s=0.2)


class Play:
    """One front with several schedulers, one after the other."""

    def __init__(self) -> None:
        self.instance = Scripted()
        instances: dict[str, InstanceClient] = {"i0": self.instance}
        self.broken: list[Exception] = []
        self.calls = FrontCalls("f0", Shared(instances), self.broken.append)
        self.live: LiveScheduler
        self.hub: Hub

    async def begin(self) -> None:
        options = RunOptions(prompts_per_step=1)
        self.live = LiveScheduler(load_policy("partial_rollout"), options, settings=SETTINGS)
        self.hub = Hub(self.live)
        await self.live.driver.add_instance(self.instance)
        self.connect()

    def connect(self) -> None:
        hub = self.hub
        accepted = hub.connect("f0", self.calls.receive)
        self.calls.connect(accepted, lambda frame: hub.receive("f0", frame))

    async def end(self) -> None:
        self.calls.disconnected()
        await self.live.close()

    def ask(self, tokens: int = 100) -> Caller:
        caller = Caller()
        self.name = self.calls.submit(caller, len(PROMPT), tokens)
        return caller


@asynccontextmanager
async def play() -> AsyncIterator[Play]:
    one = Play()
    await one.begin()
    try:
        yield one
        assert not one.broken
    finally:
        await one.calls.close()
        await one.live.close()


async def test_running_request_is_stopped_and_resumed_from_its_tokens() -> None:
    async with play() as one:
        caller = one.ask()
        await one.instance.stream(0, [5, 6])
        await one.end()
        await one.begin()
        await until(lambda: ("abort", f"{next(iter(one.instance.orders))}") in one.instance.calls)
        assert len(one.instance.orders) == 1, "sent before the first attempt has stopped"
        await one.instance.answer(0, [5, 6, 7], "abort")
        order = await one.instance.order(1)
        assert order.token_ids == [*PROMPT, 5, 6, 7]
        assert order.max_new_tokens == 97
        await one.instance.answer(1, [8])
        await until(lambda: caller.heard)
        (sample,) = caller.heard
        assert sample.response_tokens == 4
        assert sample.segments == (Segment(0, 3, "i0"), Segment(0, 1, "i0"))
        assert caller.response_ids == [5, 6, 7, 8]
        assert not len(one.calls)


async def test_waiting_requests_are_resubmitted_and_new_ones_wait() -> None:
    async with play() as one:
        await one.live.driver.remove_instance("i0")
        before = one.ask()
        await one.end()
        meanwhile = one.ask()
        assert not one.instance.orders
        await one.begin()
        await one.instance.answer(0, [5])
        await one.instance.answer(1, [6])
        await until(lambda: before.heard and meanwhile.heard)
        assert [before.response_ids, meanwhile.response_ids] == [[5], [6]]


async def test_instance_lost_meanwhile_costs_only_unstreamed_tokens() -> None:
    async with play() as one:
        caller = one.ask()
        await one.instance.stream(0, [5, 6])
        await one.end()
        await one.instance.fail(0, InstanceGone("connection refused"))
        await one.begin()
        order = await one.instance.order(1)
        assert order.token_ids == [*PROMPT, 5, 6]
        await one.instance.answer(1, [7])
        await until(lambda: caller.heard)
        assert caller.response_ids == [5, 6, 7]


async def test_request_withdrawn_while_disconnected_is_not_resubmitted() -> None:
    async with play() as one:
        caller = one.ask()
        await one.instance.order(0)
        one.hub.disconnect("f0")  # from now on nothing arrives there
        one.calls.withdraw(one.name)
        await one.end()
        assert caller.heard == [("withdrawn", "None")]
        assert not len(one.calls)
        await one.begin()
        other = one.ask()
        await one.instance.answer(1, [7])
        await until(lambda: other.heard)
        assert len(one.instance.orders) == 2


async def test_requests_ending_without_a_scheduler_are_answered() -> None:
    async with play() as one:
        stopped, full, cut = one.ask(), one.ask(2), one.ask()
        await until(lambda: len(one.instance.orders) == 3)
        await one.end()
        await one.instance.answer(0, [5], "stop")
        await one.instance.answer(1, [5, 6], "length")
        await one.instance.answer(2, [5, 6], "length")
        await until(lambda: stopped.heard and full.heard)
        finishes = [caller.heard[0].finish for caller in (stopped, full)]
        assert finishes == ["stop", "length"]
        assert stopped.heard[0].segments == (Segment(0, 1, "i0"),)
        assert not cut.heard, "the scheduler decides whether it continues"
        await one.begin()
        await one.instance.answer(3, [7])
        await until(lambda: cut.heard)
        assert cut.response_ids == [5, 6, 7]
        assert [len(caller.heard) for caller in (stopped, full)] == [1, 1]


async def test_the_same_scheduler_after_a_broken_connection_makes_nothing_twice() -> None:
    async with play() as one:
        caller = one.ask(3)
        await one.instance.stream(0, [5, 6])
        one.calls.disconnected()
        one.hub.disconnect("f0")
        await one.instance.answer(0, [5, 6, 7], "length")
        one.connect()
        await until(lambda: caller.heard)
        assert caller.response_ids == [5, 6, 7]
        assert len(one.instance.orders) == 1, "the response was already complete"
        assert not one.live.driver.view.in_flight
        assert not one.live.driver.view.anomalies


@pytest.mark.parametrize("again", [True, False])
async def test_a_client_that_leaves_while_its_attempt_stops(again: bool) -> None:
    async with play() as one:
        caller = one.ask()
        await one.instance.order(0)
        await one.end()
        if again:
            await one.begin()
        one.calls.withdraw(one.name)
        await until(lambda: caller.heard)
        assert caller.heard == [("withdrawn", "None")]
        if not again:
            await one.begin()
        await one.instance.answer(0, [5], "abort")
        await asyncio.sleep(0.01)
        assert len(one.instance.orders) == 1
        assert not len(one.calls)
        one.calls.withdraw(one.name)


async def test_frames_of_other_epochs_are_refused_and_counted() -> None:
    async with play() as one:
        old = one.hub.epoch
        caller = one.ask()
        await one.instance.order(0)
        await one.end()
        await one.begin()
        late = Dispatch("f0.9", 77, "i0", 3, 9, 0)
        one.calls.receive(encode(Orders(old, 1, [late])))
        assert one.calls.refused == 1
        one.hub.receive("f0", encode(Reports(old, 1, [RequestFinished("f0.9", 77, 1)])))
        assert one.hub.state()["f0"]["refused"] == 1
        await one.instance.answer(0, [5], "abort")
        await one.instance.answer(1, [6])
        await until(lambda: caller.heard)
        assert caller.response_ids == [5, 6]


async def test_without_any_scheduler_nothing_can_be_asked_for() -> None:
    calls = FrontCalls("f0", Shared({}), lambda error: None)
    assert not calls.known
    assert calls.max_model_len() == 0
    with pytest.raises(NoScheduler):
        calls.submit(Caller(), 1, 1)
    calls.withdraw("nobody's")
    calls.receive(b"unread")
    calls.disconnected()
    await calls.close()
